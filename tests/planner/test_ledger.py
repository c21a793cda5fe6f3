"""The ledger counts allocated bytes, FLOPs and moved bytes; arithmetic on the shapes of a model checks its result."""

from harness.model.attention import mask_of_window
from planner import layers
from planner.attention import flash_workspace, pairs_in_documents
from planner.ledger import VARLEN_BACKWARD, Counts, Ledger, Peak, counts_of_step, hull_of
from planner.quantized import Linear4bit

import bitsandbytes
import pytest
import torch
from conftest import ROOT, slow
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.varlen import varlen_attn
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

MEGA = 2**20


def rounded(size: int) -> int:
    """Bytes in the blocks of 512 that CUDA's allocator hands out."""
    return -(-size // 512) * 512


def test_allocations_are_counted_once():
    ledger = Ledger()
    with ledger, ledger.within(moment="forward", holder="activations"):
        kept = torch.zeros(MEGA)  # 4 MiB
        view = kept.view(1024, 1024)[1:]
        released = kept + 1
        del released
        with ledger.within(moment="backward"):
            product = view @ view.T
    peaks = ledger.peaks()
    assert peaks["forward"] == Peak(8 * MEGA, {"activations": 8 * MEGA})
    assert peaks["backward"].by_holder["activations"] == 4 * MEGA + rounded(1023 * 1023 * 4)
    assert ledger.flops == {"torch.float32": 2 * 1023 * 1024 * 1023}
    ledger.mark(kept, "weights", "host")
    assert ledger.peaks("host")["load"] == Peak(4 * MEGA, {"weights": 4 * MEGA})
    assert ledger.peaks()["forward"].by_holder["weights"] == 4 * MEGA  # since it was allocated
    del product


def test_cast_weights_are_gathered_and_logits_belong_to_the_loss():
    ledger = Ledger(vocabulary=1000)
    weight = torch.zeros(64, 1000)
    with ledger, ledger.within(moment="forward", holder="activations"):
        ledger.mark(weight, "weights")
        cast = weight.to(torch.bfloat16)
        logits = torch.zeros(8, 64, dtype=torch.bfloat16) @ cast
    by_holder = ledger.peaks()["forward"].by_holder
    assert (by_holder["gathered"], by_holder["loss"]) == (64 * 1000 * 2, rounded(8 * 1000 * 2))
    assert ledger.take_counts().flops == {"torch.bfloat16": 2 * 8 * 64 * 1000}
    assert not ledger.take_counts().flops
    del logits


def test_bytes_that_operators_read_and_write():
    """Neither a view of a fake tensor nor a question for its device touches bytes. The FLOPs stand for a matrix product."""
    with FakeTensorMode(), Ledger() as ledger:
        tensor = torch.empty(MEGA)
        matrix = tensor.view(1024, 1024)
        assert tensor.device.type == "cpu" and matrix.T.device == tensor.device
        torch.ops.aten._unsafe_view(tensor, [1024, 1024])
        matrix @ matrix
        assert ledger.touched == 0
        tensor + 1
    assert ledger.touched == 8 * MEGA  # read and written


@pytest.mark.parametrize("is_nested", [False, True])
def test_bytes_that_unpacking_reads_and_writes(is_nested):
    """Of the tensors that bitsandbytes makes."""
    packed, state = bitsandbytes.functional.quantize_4bit(torch.randn(256, 512), quant_type="nf4", compress_statistics=is_nested)
    scales = state.absmax.numel() * 4
    expected = packed.nbytes + scales + 2 * 256 * 512
    if is_nested:
        expected += state.absmax.nbytes + scales + 2 * scales  # bytes become float32, and the offset is added
    settings, ledger = BitsAndBytesConfig(bnb_4bit_compute_dtype=torch.bfloat16, bnb_4bit_use_double_quant=is_nested), Ledger()
    assert Linear4bit.of_size(256, 512, None, settings, ledger).unpacked(torch.bfloat16).shape == (256, 512)
    assert ledger.touched == expected


@pytest.mark.parametrize("window", [(-1, 0), (-1, -1), (3, 0), (3, 2), (99, 99)])
def test_flops_of_attention_are_those_of_each_document(window):
    """Two products forward and five backward for every pair of tokens that attend to each other, counted with a mask."""
    assert pairs_in_documents(torch.tensor([0, 5, 6, 18]), 12, list(window)) == count_pairs([5, 1, 12], window)
    pairs = count_pairs([6, 6, 6], window)  # a fake tensor has no values: all documents are as long as the longest
    with FakeTensorMode(), Ledger() as ledger:
        ends = torch.arange(0, 19, 6, dtype=torch.int32)
        query = torch.randn(18, 4, 8, requires_grad=True)
        key, value = torch.randn(18, 2, 8), torch.randn(18, 2, 8)
        output = varlen_attn(query, key, value, ends, ends, 6, 6, window_size=window, enable_gqa=True)
        assert ledger.take_counts().flops == {"torch.float32": 4 * pairs * 4 * 8}
        output.backward(torch.ones_like(output))
        assert ledger.take_counts().flops == {"torch.float32": 10 * pairs * 4 * 8}


def count_pairs(lengths: list[int], window: tuple[int, int]) -> int:
    return sum(int(mask_of_window(length, *window).sum()) for length in lengths)


def test_memory_of_attention_on_fake_tensors():
    """Forward keeps the output and one float32 per token and head, backward makes three gradients. There is no mask."""
    ledger, tokens, heads, size = Ledger(), 4096, 8, 64
    with FakeTensorMode(), ledger, ledger.within(moment="forward"):
        query = torch.empty(tokens, heads, size, dtype=torch.bfloat16, requires_grad=True)
        key = torch.empty(tokens, 2, size, dtype=torch.bfloat16, requires_grad=True)
        ends = torch.arange(0, tokens + 1, 1024, dtype=torch.int32)
        before = ledger.peaks()["forward"].bytes
        output = varlen_attn(query, key, key, ends, ends, 1024, 1024, window_size=(-1, 0), enable_gqa=True)
        assert ledger.peaks()["forward"].bytes - before == query.nbytes + tokens * heads * 4 + 512  # of a random state
        assert ledger.take_counts().flops == {"torch.bfloat16": 4 * 4 * (1024 * 1025 // 2) * heads * size}
        gradient, before = torch.empty_like(output), ledger.peaks()["forward"].bytes
        ledger.workspaces[VARLEN_BACKWARD] = lambda gradient, query, key, *rest: flash_workspace(query, key, documents=4)
        with ledger.within(moment="backward"):
            output.backward(gradient)
    own = 4 * (tokens + 4 * 128) * heads * (size + 1) + 2 * query.nbytes  # of the kernel
    zeros = tokens * heads * 4 + 512  # autograd makes them as the gradients of the other two outputs
    assert ledger.peaks()["backward"].bytes - before == query.nbytes + 2 * key.nbytes + zeros + own


def test_largest_memory_with_larger_micro_batches():
    """Before the layer that is gathered, more activations are held: with a larger micro-batch they are the peak."""
    with Ledger() as ledger, ledger.within(moment="forward"):
        with ledger.within(holder="activations"):
            kept, freed = torch.zeros(2 * MEGA), torch.zeros(2 * MEGA)
        del freed
        with ledger.within(holder="gathered"):
            gathered = torch.zeros(3 * MEGA)
    assert hull_of(ledger.highest().values()) == [(12 * MEGA, 8 * MEGA), (0, 16 * MEGA)]
    del kept, gathered


def test_counts_of_a_step_with_many_micro_batches():
    def counts(**moved: int) -> Counts:
        return Counts(flops={"bf16": 5}, moved=moved, touched=1)

    first, last = counts(gathered=8), counts(reduced=4)
    expected = Counts(flops={"bf16": 40}, moved={"gathered": 8, "reduced": 4}, touched=8)
    assert counts_of_step([first, last], 8) == expected
    both = counts(gathered=8, reduced=4)
    assert counts_of_step([both, both], 3).moved == {"gathered": 24, "reduced": 12}
    assert counts_of_step([both], 2).moved == {"gathered": 16, "reduced": 8}
    assert counts_of_step([counts(all_reduced=4)], 8).moved == {"all_reduced": 4}, "replicas all-reduce once per step"
    # The first micro-batch adds to nothing.
    assert counts_of_step([counts(to_host=4, added_on_host=4)], 8).moved == {"to_host": 32, "added_on_host": 28}


@pytest.mark.parametrize(("limit", "expected"), [(None, 1024 * 1024 + 4 * MEGA), (MEGA, 1024 * 1024 + 3 * MEGA)])
def test_pinned_memory_is_rounded_up_to_powers_of_two(limit, expected):
    """Unless it is larger than `pinned_max_round_threshold_mb`."""
    with Ledger() as ledger, ledger.within(moment="forward", place="host"):
        ledger.pinned_limit = limit
        pinned = [torch.zeros(size, dtype=torch.uint8) for size in (640 * 1024, 3 * MEGA)]
        for tensor in pinned:
            ledger.pin(tensor)
    assert ledger.peaks("host")["forward"].bytes == expected


def held(ledger: Ledger) -> int:
    """Bytes that are allocated now."""
    return sum(event.change for event in ledger.events)


def test_operators_between_two_products_are_one_kernel():
    """And the backward pass keeps of a sum that no kernel writes the product in it, until the sum is written."""
    mega = 1024**2
    with FakeTensorMode(), Ledger() as ledger:
        x, weight = torch.empty(256, 1024), torch.empty(1024, 1024)  # 1 and 4 MiB
        ledger.is_fused = True
        y = torch.sin(2 * x) + x
        assert (ledger.touched, held(ledger)) == (mega, 5 * mega), "x is read once, nothing is written"
        product = y @ weight
        assert (ledger.touched, held(ledger)) == (2 * mega, 7 * mega), "y and the product are"
        product.mul_(2)
        assert ledger.touched == 4 * mega, "a product is in memory"
        y.add_(product)
        assert ledger.touched == 6 * mega, "a kernel reads it once, and writes y again"
        del product, y
        total = 2 * (x @ weight) + x
        assert held(ledger) == 6 * mega, "the product"
        ledger.write(total)
        assert held(ledger) == 6 * mega, "the sum in its place"
        del total
        assert held(ledger) == 5 * mega
        adapted = 2 * (x @ weight + x @ weight)
        assert held(ledger) == 6 * mega, "the sum of two products is smaller than both"
    del adapted


@slow
def test_compiled_layers_count_in_a_plan(simulate):
    """The products are as without them, less memory is touched, and fewer activations are kept. Liger's kernels do not count.

    It takes minutes: three simulations of a whole recipe, because the kernels were counted on an H100 with its model.
    """
    pair = (ROOT / "recipes/qwen2_fineweb_edu.py", ROOT / "accelerate_configs/1x3090.yaml")
    flags = ([], ["--use_liger_kernel", "true"], ["--torch_compile", "true"])
    plain, liger, compiled = simulate([(*pair, words, "cuda") for words in flags])
    assert plain["step"] == liger["step"] and plain["peaks"] == liger["peaks"]
    assert plain["step"]["flops"] == compiled["step"]["flops"]
    assert plain["step"]["launches"] / 8 == pytest.approx(3849, rel=0.04), "measured on an H100, of each of 8 micro-batches"
    assert compiled["step"]["touched"] < 0.6 * plain["step"]["touched"]
    peaks = [max(peak["bytes"] for peak in found["peaks"].values()) for found in (plain, compiled)]
    assert peaks[1] < peaks[0], peaks


CHANGES = [
    lambda model: model.model.layers[5].mlp.up_proj.weight.requires_grad_(False),
    lambda model: setattr(model.model.layers[5].mlp, "up_proj", torch.nn.Linear(16, 33, bias=False, device="meta")),
    lambda model: setattr(model.config, "layer_types", ["full_attention"] * 7 + ["sliding_attention"]),
    lambda model: model.model.layers.pop(-1),  # it does not pay
]


@pytest.mark.parametrize("change", CHANGES)
def test_layers_that_differ_are_all_simulated(change):
    with torch.device("meta"):
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 8}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
    assert layers.equal_layers(model) is model.model.layers
    change(model)
    assert layers.equal_layers(model) is None
