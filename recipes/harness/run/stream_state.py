"""What `datasets` 5.2 leaves out of the state of a stream: the rows in a shuffle's buffer, and where in a file a row stands."""

import copy
import itertools

import pyarrow
from datasets.iterable_dataset import ArrowExamplesIterable, BufferShuffledExamplesIterable, _BaseExamplesIterable
from pyarrow import parquet


def complete():
    """Makes `state_dict` of every stream of this process exact, and `load_state_dict` as quick late in a file as early."""
    shuffle = BufferShuffledExamplesIterable
    shuffle.iter_arrow, shuffle.load_state_dict = None, _BaseExamplesIterable.load_state_dict
    shuffle._init_state_dict, shuffle.__iter__ = _beginning, _shuffled
    for name in ("__iter__", "_iter_arrow"):
        read = getattr(ArrowExamplesIterable, name)
        if read.__module__ != __name__:
            setattr(ArrowExamplesIterable, name, _from_row_group(read))


class Rows(tuple):
    """Rows that nobody changes: `datasets` copies a state for every row it reads."""

    def __deepcopy__(self, memo):
        return self


def _beginning(self) -> dict:
    source = self.ex_iterable._init_state_dict()
    kind = type(self).__name__
    self._state_dict = {"examples_iterable": source, "rows": None, "random": None, "yielded": 0, "type": kind}
    return self._state_dict


def _shuffled(self):
    """Fills the buffer, yields half of it in random order, fills it again. The state is that before the order was drawn."""
    state = self._state_dict or {"rows": None, "yielded": 0}
    random, source, rows = copy.deepcopy(self.generator), iter(self.ex_iterable), state["rows"] or ()
    if state["rows"] is not None:
        random.bit_generator.state = state["random"]
    while True:
        if state["rows"] is None:
            rows = Rows((*rows, *(row for _, row in itertools.islice(source, self.buffer_size - len(rows)))))
            state |= {"rows": rows, "random": random.bit_generator.state, "yielded": 0}
        order, is_last = random.permutation(len(rows)), len(rows) < self.buffer_size
        yields = len(rows) - (0 if is_last else self.buffer_size // 2)
        for index in order[state["yielded"] : yields]:
            state["yielded"] += 1
            yield "", rows[index]
        if is_last:
            return
        rows, state["rows"] = [rows[index] for index in order[yields:]], None


def _from_row_group(read):
    """`read` of a source, which then begins in the row group where it left a Parquet file, not at the file's beginning."""

    def from_row_group(self):
        rows = self._state_dict["shard_example_idx"] if self._state_dict else 0
        if rows:
            self, generate, first = copy.copy(self), self.generate_tables_fn, iter([True])

            def tables(**kwargs):
                passed, groups = 0, []
                if next(first, False) and kwargs.get("row_groups_list") == [None] and generate.__self__.config.filters is None:
                    groups, passed = _groups_from(kwargs["files"][0], rows)
                if passed:
                    yield "", pyarrow.table({"passed": pyarrow.nulls(passed)})
                    kwargs["row_groups_list"] = [groups]
                yield from generate(**kwargs)

            self.generate_tables_fn = tables
        yield from read(self)

    return from_row_group


def _groups_from(file: str, rows: int) -> tuple[list[int], int]:
    """The row groups from that of row number `rows` on, and how many rows lie before them."""
    from datasets.utils.file_utils import xopen

    with xopen(file, "rb") as opened:
        about = parquet.read_metadata(opened)
    sizes = [about.row_group(index).num_rows for index in range(about.num_row_groups)]
    starts = [0, *itertools.accumulate(sizes)]
    index = next((i for i in range(len(sizes)) if starts[i + 1] > rows), len(sizes))
    while index and (index == len(sizes) or sizes[index] != sizes[0]):  # the size of the first decides how tables are cut
        index -= 1
    return [*range(index, len(sizes))], starts[index]
