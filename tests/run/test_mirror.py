"""--mirror: what is uploaded, what a fresh machine gets back, and who may write there."""

import json
import os
import shutil
import signal
import subprocess
import threading
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace

from harness.folder import CHOICE_OF_ROWS, newest_complete_checkpoint, read_json
from harness.messages import UserError
from harness.run import marker, mirror
from harness.run.settings import RunSettings

import pytest
from conftest import ROOT, assert_one_error, free_port, losses, read, slow, wait_until

RECIPE = "qwen2_fineweb_edu"
FLAGS = ["--max_steps", "6", "--save_steps", "2", "--logging_steps", "1", "--eval_strategy", "no", "--max_length", "64"]
FLAGS += ["--gradient_accumulation_steps", "1"]
IDENTITY = {"recipe": "some", "model": "tiny", "config": "a", "tiny": True, "sharded": True, "data_files": []}
IDENTITY |= dict.fromkeys(CHOICE_OF_ROWS)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Makes a mirror and output directories with checkpoints; `open_mirror` is what a run does before its first step."""
    monkeypatch.setenv("NODE_SILENCE", "1")
    args = SimpleNamespace(load_best_model_at_end=False)
    opened = []

    def open_mirror(name: str, limit: int = 2, separate_disks: bool = False) -> mirror.Mirror:
        settings = RunSettings(mirror=(tmp_path / "mirror").as_uri(), separate_disks=separate_disks)
        args.output_dir, args.save_total_limit = str(tmp_path / name), limit
        Path(args.output_dir).mkdir(exist_ok=True)
        mirror.check(settings.mirror, IDENTITY, Path(args.output_dir))
        mirror.claim(settings.mirror, IDENTITY, Path(args.output_dir))
        opened.append(mirror.Mirror(SimpleNamespace(args=args), None, settings))
        opened[-1].pull()
        return opened[-1]

    yield open_mirror
    for one in opened:
        one.close()


def save(one: mirror.Mirror, step: int, finish: bool = True, best: str | None = None):
    """Writes a complete checkpoint, and uploads it as a run does. `best`: the path of the best checkpoint until now."""
    checkpoint = one.output_dir / f"checkpoint-{step}"
    marker.begin_writing(checkpoint)
    (checkpoint / "part").mkdir()
    (checkpoint / "model.bin").write_bytes(os.urandom(1000))
    (checkpoint / "part/__0_0.distcp").write_bytes(os.urandom(3000))
    (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": step, "best_model_checkpoint": best}))
    content = {"geometry": dict.fromkeys(marker.COUNTS, 1), "progress": {}}
    marker.write_marker(checkpoint, content | {"files": marker.sync_files(checkpoint, lambda name: True)})
    one.on_save(None, SimpleNamespace(global_step=step, best_model_checkpoint=best), None)
    if finish:
        one.finish()


def complete(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in folder.glob("checkpoint-*/complete.json"))


def content(checkpoint: Path) -> dict[str, bytes]:
    return {str(path.relative_to(checkpoint)): path.read_bytes() for path in checkpoint.rglob("*") if path.is_file()}


def test_old_checkpoints_are_removed_and_the_newest_comes_back(place, tmp_path):
    run = place("first")
    for step in (2, 4, 6):
        save(run, step)
    assert complete(tmp_path / "mirror") == ["checkpoint-4", "checkpoint-6"] and run.results()["mirror"]["uploaded"] == 3
    assert not (tmp_path / "mirror/checkpoint-2").exists()
    run.close()
    place("fresh")
    assert complete(tmp_path / "fresh") == ["checkpoint-6"]
    assert content(tmp_path / "fresh/checkpoint-6") == content(tmp_path / "first/checkpoint-6")


BEST = "/of/another/machine/checkpoint-2"


def test_the_best_checkpoint_comes_back(place, tmp_path):
    """It stays in the mirror when the fresh machine uploads the next one, also while it starts."""
    run = place("first")
    for step in (2, 4, 6):
        save(run, step, best=BEST)
    run.close()
    run = place("fresh")
    assert complete(tmp_path / "fresh") == ["checkpoint-2", "checkpoint-6"]
    assert content(tmp_path / "fresh/checkpoint-2") == content(tmp_path / "first/checkpoint-2")
    save(run, 8, best=BEST)
    assert complete(tmp_path / "mirror") == ["checkpoint-2", "checkpoint-6", "checkpoint-8"]
    run.close()
    shutil.rmtree(tmp_path / "mirror/checkpoint-8")  # its upload had not finished
    place("fresh", limit=1).finish()
    assert complete(tmp_path / "mirror") == ["checkpoint-2", "checkpoint-8"]


@pytest.mark.parametrize("separate_disks", [False, True])
@pytest.mark.parametrize(
    ("best", "damage", "words"),
    [
        (BEST, lambda path: shutil.rmtree(path), "checkpoint-2, the best checkpoint, is lost: it is not in file:///"),
        (BEST, lambda path: (path / "model.bin").write_bytes(bytes(1000)), "is lost: model.bin was changed"),
        ("checkpoint-2/..", lambda path: None, ""),
    ],
    ids=["missing", "changed", "name"],
)
def test_a_best_checkpoint_that_is_lost_ends_no_run(place, tmp_path, capsys, separate_disks, best, damage, words):
    run = place("first")
    for step in (2, 4, 6):
        save(run, step, best=best)
    run.close()
    damage(tmp_path / "mirror/checkpoint-2")
    capsys.readouterr()
    run = place("fresh", separate_disks=separate_disks)
    printed = capsys.readouterr().out
    assert words in printed and ("is lost" in printed) == bool(words)
    assert [path.name for path in (tmp_path / "fresh").glob("checkpoint-*")] == ["checkpoint-6"]
    save(run, 8)
    assert complete(tmp_path / "mirror") == ["checkpoint-6", "checkpoint-8"]


@pytest.mark.parametrize("limit", [0, -1])
def test_without_a_limit_all_checkpoints_are_kept(place, tmp_path, limit):
    run = place("first", limit)
    for step in (2, 4, 6):
        save(run, step)
    assert complete(tmp_path / "mirror") == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]


def test_checkpoint_that_is_damaged_in_the_mirror_only_is_uploaded_again(place, tmp_path):
    run = place("first")
    save(run, 2)
    save(run, 4)
    run.close()
    (tmp_path / "mirror/checkpoint-4/complete.json").write_text("{")
    place("first", separate_disks=True).close()
    assert complete(tmp_path / "mirror") == ["checkpoint-2", "checkpoint-4"]
    assert content(tmp_path / "mirror/checkpoint-4") == content(tmp_path / "first/checkpoint-4")


def test_files_in_place_of_checkpoints(place, tmp_path):
    run = place("first")
    save(run, 2)
    run.close()
    (tmp_path / "mirror/checkpoint-4").touch()
    (tmp_path / "first/checkpoint-4").touch()
    began = time.monotonic()
    run = place("first")
    (tmp_path / "first/checkpoint-4").unlink()
    save(run, 4)
    assert complete(tmp_path / "mirror") == ["checkpoint-2", "checkpoint-4"] and time.monotonic() - began < 30


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: (path / "complete.json").unlink(), ""),
        (lambda path: (path / "model.bin").write_bytes(bytes(1000)), "model.bin was changed"),
        (lambda path: (path / "model.bin").unlink(), "model.bin is missing"),
        (lambda path: os.truncate(path / "part/__0_0.distcp", 10), "__0_0.distcp has 10 bytes, it had 3,000"),
        (lambda path: (path / "complete.json").write_text("{"), "complete.json is damaged"),
    ],
    ids=["killed before the marker", "changed", "missing", "truncated", "marker"],
)
def test_damaged_and_incomplete_checkpoints_are_skipped(place, tmp_path, capsys, damage, words):
    """The output directory of the fresh machine has an older checkpoint; the damaged one is uploaded again later."""
    run = place("first")
    save(run, 2)
    place_of_old = tmp_path / "fresh"
    shutil.copytree(tmp_path / "first/checkpoint-2", place_of_old / "checkpoint-2")
    save(run, 4)
    save(run, 6)
    run.close()
    damage(tmp_path / "mirror/checkpoint-6")
    run = place("fresh")
    assert words in capsys.readouterr().out
    assert newest_complete_checkpoint(place_of_old).name == "checkpoint-4" and not marker.find_damage(
        place_of_old / "checkpoint-4"
    )
    assert complete(tmp_path / "mirror") == ["checkpoint-4"]
    shutil.rmtree(place_of_old / "checkpoint-6", ignore_errors=True)  # `find_checkpoint` deletes it
    save(run, 6)
    assert complete(tmp_path / "mirror") == ["checkpoint-4", "checkpoint-6"]
    assert content(tmp_path / "mirror/checkpoint-6") == content(place_of_old / "checkpoint-6")


def test_all_checkpoints_damaged_is_an_error(place, tmp_path, error_of):
    run = place("first")
    save(run, 2)
    run.close()
    (tmp_path / "mirror/checkpoint-2/model.bin").write_bytes(b"")
    message = error_of(place, "fresh")
    assert "no checkpoint in file:///" in message and "checkpoint-2: model.bin has 0 bytes, it had 1,000" in message
    assert complete(tmp_path / "mirror") == ["checkpoint-2"]


def test_what_is_on_the_disk_is_used(place, tmp_path, monkeypatch):
    """Undamaged files are not downloaded again, and a newer checkpoint of the disk is uploaded instead."""
    run = place("first")
    save(run, 2)
    save(run, 4)
    (tmp_path / "first/checkpoint-4/model.bin").write_bytes(b"damaged")
    run.close()
    downloads = []
    download = mirror.Storage.download
    monkeypatch.setattr(mirror.Storage, "download", lambda self, name, file: [downloads.append(name), download(self, name, file)])
    run = place("first")
    assert downloads == ["checkpoint-4/model.bin"] and not marker.find_damage(tmp_path / "first/checkpoint-4")
    run.close()
    shutil.rmtree(tmp_path / "mirror/checkpoint-4")  # its upload had not finished
    run = place("first")
    run.finish()
    assert len(downloads) == 1 and complete(tmp_path / "mirror") == ["checkpoint-2", "checkpoint-4"]


def test_uploads_that_fail_are_tried_again_and_end_no_run(place, tmp_path, monkeypatch, capsys):
    run, upload, failures = (
        place("first"),
        mirror.Storage.upload,
        [OSError("503 from s3://key:secret@host"), RuntimeError("no route")],
    )

    def fail_first(storage: mirror.Storage, file: Path, name: str):
        if failures:
            raise failures.pop()
        upload(storage, file, name)

    monkeypatch.setattr(mirror.Storage, "upload", fail_first)
    save(run, 2)
    printed = capsys.readouterr().out
    assert complete(tmp_path / "mirror") == ["checkpoint-2"] and "failed (no route); it is tried again" in printed
    failures += [OSError("503 from s3://key:secret@host")] * 9
    save(run, 4, finish=False)
    wait_until(lambda: len(failures) == 8, 10, lambda: "it did not try")
    save(run, 6, finish=False)  # the upload of checkpoint-4 waits to be tried again: it is given up
    failures.clear()
    run.finish()
    printed = capsys.readouterr().out
    assert "warning: checkpoint-4 is not in" in printed and "503 from s3://host" in printed and "secret" not in printed
    assert run.results()["mirror"]["failed"].keys() == {"checkpoint-4"} and complete(tmp_path / "mirror")[-1] == "checkpoint-6"


def test_training_waits_only_for_an_upload_when_the_next_is_due(place, tmp_path, monkeypatch, capsys):
    run, upload = place("first"), mirror.Storage.upload
    may_end = {"checkpoint-2": threading.Event(), "checkpoint-4": threading.Event()}

    def upload_later(storage: mirror.Storage, file: Path, name: str):
        may_end[name.split("/")[0]].wait(60)
        upload(storage, file, name)

    monkeypatch.setattr(mirror.Storage, "upload", upload_later)
    save(run, 2, finish=False)
    run.on_step_end(None, None, None)
    assert run.transfer.thread.is_alive() and not complete(tmp_path / "mirror")
    threading.Timer(4, may_end["checkpoint-2"].set).start()
    save(run, 4, finish=False)  # waits
    assert complete(tmp_path / "mirror") == ["checkpoint-2"] and "for the upload of checkpoint-2" in capsys.readouterr().out
    assert 1 < run.results()["mirror"]["seconds_waited"] < 30
    threading.Timer(1, may_end["checkpoint-4"].set).start()
    run.finish()
    assert "Uploading checkpoint-4 to file:///" in capsys.readouterr().out
    assert complete(tmp_path / "mirror") == ["checkpoint-2", "checkpoint-4"]


def kill(run: mirror.Mirror):
    """What is left of a run that was killed: a heartbeat that no longer changes."""
    run.heartbeat.has_ended.set()
    run.heartbeat.thread.join()


def test_a_second_run_is_refused(place, tmp_path, error_of, capsys):
    """Not a restart in the same folder, nor on another machine once the killed run is silent."""
    run = place("first")
    message = error_of(place, "second")
    assert "--mirror: a run on " in message and "is writing to file:///" in message
    kill(run)
    capsys.readouterr()
    run = place("first")
    assert "waiting" not in capsys.readouterr().out
    kill(run)
    began = time.monotonic()
    second = place("second")
    assert time.monotonic() - began >= 1 and "waiting 1 s for a sign" in capsys.readouterr().out
    save(second, 2)
    with pytest.raises(
        UserError, match="holds a run with model tiny, this run has model other: pass the same values, choose another --mirror"
    ):
        mirror.check(run.storage.url, IDENTITY | {"model": "other"}, tmp_path / "third")


def test_a_run_that_lost_the_mirror_stops_uploading(place, tmp_path, capsys):
    run = place("first")
    save(run, 2)
    beat = read_json(tmp_path / "mirror/heartbeat.json") | {"run": "other"}
    (tmp_path / "mirror/heartbeat.json").write_text(json.dumps(beat))
    wait_until(lambda: run.heartbeat.is_taken, 5, lambda: "it did not notice")
    save(run, 4)
    assert complete(tmp_path / "mirror") == ["checkpoint-2"] and "another run has taken the mirror" in capsys.readouterr().out
    run.close()
    assert read_json(tmp_path / "mirror/heartbeat.json")["run"] == "other"


def test_sizes_in_the_mirror_are_compared(place, tmp_path, monkeypatch, capsys):
    """A file that arrives cut off, without an error: the checkpoint gets no marker, and the run continues."""
    run, upload = place("first"), mirror.Storage.upload

    def cut_off(storage: mirror.Storage, file: Path, name: str):
        upload(storage, file, name)
        os.truncate(tmp_path / "mirror" / name, 10)

    monkeypatch.setattr(mirror.Storage, "upload", cut_off)
    save(run, 2)
    assert not complete(tmp_path / "mirror") and "model.bin is not there after its upload" in capsys.readouterr().out
    assert run.results()["mirror"]["failed"].keys() == {"checkpoint-2"}


@pytest.mark.parametrize("name", ["../../x", "/tmp/x", "part/../../../x", "", "."])
def test_names_outside_of_a_checkpoint_are_refused(place, tmp_path, error_of, name):
    run = place("first")
    save(run, 2)
    run.close()
    content = marker.read_marker(tmp_path / "first/checkpoint-2")
    content["files"] |= {name: content["files"]["model.bin"]}
    del content["checksum"]
    (tmp_path / "mirror/checkpoint-2/complete.json").write_text(
        json.dumps(content | {"checksum": marker.checksum_of_content(content)})
    )
    (tmp_path / "x").write_text("mine")
    message = error_of(place, "fresh")
    assert f"complete.json names {name!r}, which is no file in the checkpoint" in message and "checkpoint-2" in message
    assert (tmp_path / "x").read_text() == "mine" and not list((tmp_path / "fresh").glob("checkpoint-*"))


def test_links_are_not_followed(place, tmp_path, capsys):
    """Neither when a checkpoint is downloaded into a folder with links, nor when one with a link is uploaded."""
    run = place("first")
    save(run, 2)
    run.close()
    (tmp_path / "elsewhere/part").mkdir(parents=True)
    (tmp_path / "elsewhere/model.bin").write_text("mine")
    (tmp_path / "fresh/checkpoint-2").mkdir(parents=True)
    (tmp_path / "fresh/checkpoint-2/part").symlink_to(tmp_path / "elsewhere/part")
    (tmp_path / "fresh/checkpoint-2/model.bin").symlink_to(tmp_path / "elsewhere/model.bin")
    place("fresh").close()
    assert content(tmp_path / "fresh/checkpoint-2") == content(tmp_path / "first/checkpoint-2")
    assert (tmp_path / "elsewhere/model.bin").read_text() == "mine" and not list((tmp_path / "elsewhere/part").iterdir())
    shutil.rmtree(tmp_path / "other", ignore_errors=True)
    run = place("fresh")
    (tmp_path / "fresh/config.json").symlink_to(tmp_path / "elsewhere/model.bin")
    run.upload_model()
    assert not (tmp_path / "mirror/config.json").exists()
    save(run, 4)
    checkpoint = tmp_path / "fresh/checkpoint-4"
    (checkpoint / "model.bin").unlink()
    (checkpoint / "model.bin").symlink_to(tmp_path / "elsewhere/model.bin")
    shutil.rmtree(tmp_path / "mirror/checkpoint-4")
    run.on_save(None, SimpleNamespace(global_step=4, best_model_checkpoint=None), None)
    run.finish()
    assert "model.bin is a link that leads out of the checkpoint" in capsys.readouterr().out
    assert not (tmp_path / "mirror/checkpoint-4/model.bin").exists()


BEAT = {"run": "other", "host": "a", "silence": 1, "written": 1.0}


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("run.json", "{", "run.json is damaged"),
        ("run.json", "[]", "run.json is damaged"),
        ("run.json", '{"recipe": 3}', "recipe is 3, expected a text"),
        ("run.json", json.dumps(IDENTITY | {"data_files": [[1]]}), "data_files is [[1]], expected a list"),
        ("run.json", json.dumps(IDENTITY | {"settings": []}), "settings is [], expected an object"),
        ("run.json", "[" * 100_000, "run.json is damaged"),
        ("train_results.json", '{"global_step": "6"}', "global_step is '6', expected a whole number"),
        ("train_results.json", '{"global_step": 6, "final_loss": 1}', "epoch is missing"),
        ("heartbeat.json", "nonsense", "heartbeat.json is damaged"),
        ("heartbeat.json", json.dumps(BEAT | {"silence": 10**9}), "silence is 1000000000, expected up to 3600 seconds"),
        ("heartbeat.json", json.dumps(BEAT | {"silence": -1}), "silence is -1, expected up to 3600 seconds"),
        ("heartbeat.json", json.dumps(BEAT | {"silence": 1e9}), "silence is 1000000000.0, expected a whole number"),
        ("heartbeat.json", json.dumps(BEAT | {"host": ["a"]}), "host is ['a'], expected a text"),
        ("heartbeat.json", "{}", "run is missing"),
    ],
)
def test_odd_files_in_a_mirror_are_errors(place, tmp_path, error_of, file, text, words):
    place("first").close()
    (tmp_path / "mirror" / file).write_text(text)
    message = error_of(place, "second")
    assert message.startswith("--mirror: ") and words in message and len(message) < 600


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--mirror", "s3://key:se/cret@bucket/run"], "a URL with a password would be shown"),
        (["--mirror", "bucket/run"], "bucket/run is not a URL: expected one such as s3://"),
        (["--mirror", "hf://me/model"], "expected hf://buckets/"),
        (["--mirror", "s4://bucket/run"], "Protocol not known: s4"),
        (["--mirror", "s3://bucket/run"], "-m pip install s3fs=="),
        (["--preview", "--mirror", "file:///tmp/x"], "--mirror is for training"),
    ],
)
def test_wrong_urls(fork_launch, flags, words):
    options = [flag for flag in flags if flag == "--preview"]
    config = [] if options else ["1x3090"]
    process = fork_launch(*options, "--tiny", RECIPE, *config, *flags[len(options) :])
    assert_one_error(process, words)
    assert "cret" not in process.stderr


def test_fresh_machine_continues(fork_launch, workdir):
    """Two sharded processes; the machine is lost between the upload of the files and of the marker, and after the end."""
    run, place = workdir / "runs/mirrored", workdir / "mirror"
    command = ["--tiny", RECIPE, "4gpu_full_shard", "--output_dir", run, "--mirror", f"file://{place}", *FLAGS]
    process = fork_launch(*command, NPROC_PER_NODE="2")
    assert process.returncode == 0, process.stderr
    assert "The model and 2 checkpoints are in file:///" in process.stdout and not (place / "heartbeat.json").exists()
    assert read(run)["mirror"] == {"uploaded": 3, "failed": {}, "seconds_waited": 0.0}
    uninterrupted, model = losses(run), (run / "model.safetensors").read_bytes()
    date = read(run, "run.json")["date"]
    assert (place / "model.safetensors").read_bytes() == model

    shutil.rmtree(run)
    process = fork_launch(*command, NPROC_PER_NODE="2")
    assert process.returncode == 0 and "is finished: 6 steps" in process.stdout, process.stderr
    for name in ("train_results.json", "model.safetensors", "checkpoint-6/complete.json"):  # as before the end
        (place / name).unlink()
    process = fork_launch(*command, NPROC_PER_NODE="2")
    assert process.returncode == 0, process.stderr
    assert read(run)["resumed_from_step"] == 4 and losses(run) == uninterrupted
    assert read(run, "run.json")["date"] == date
    assert (place / "model.safetensors").read_bytes() == model
    assert complete(place) == complete(run) == ["checkpoint-4", "checkpoint-6"]


@pytest.mark.parametrize("uploads", ["slow", pytest.param("fail", marks=slow)])
def test_signal_while_a_checkpoint_is_uploaded(fork_launch, workdir, uploads):
    """The run exits when the upload is finished, also that of the checkpoint of the signal; or it says that it is not."""
    run, place = workdir / f"runs/stopped-{uploads}", workdir / f"mirror-{uploads}"
    recipe, flags = ROOT / "tests/run/stop_while_uploading.py", ["--output_dir", run, "--mirror", f"file://{place}", *FLAGS]
    process = fork_launch("--tiny", recipe, "1x3090", *flags, "--max_steps", "500", UPLOADS=uploads)
    assert process.returncode == 143 and not process.stderr, process.stderr
    stopped_at = newest_complete_checkpoint(run).name
    assert f"Uploading {stopped_at} to file:///" in process.stdout and stopped_at in process.stdout.split("Stopped by SIGTERM")[1]
    if uploads == "slow":
        assert complete(place) == ["checkpoint-2", stopped_at]
        assert content(place / stopped_at) == content(run / stopped_at) and "warning" not in process.stdout
    else:
        assert not complete(place) and f"warning: {stopped_at} is not in file:///" in process.stdout
        assert "the network is down" in process.stdout


@pytest.fixture
def s3(s3_python, tmp_path):
    """An S3 server with an empty bucket; returns the environment of a run that uses it."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with (tmp_path / "moto.log").open("w") as log:
        server = subprocess.Popen([s3_python, "-m", "moto.server", "-p", str(port)], stdout=log, stderr=log)

    def make_bucket() -> bool:
        try:
            return urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT")).status == 200
        except OSError:
            return False

    wait_until(make_bucket, 60, (tmp_path / "moto.log").read_text)
    names = {"AWS_ACCESS_KEY_ID": "some", "AWS_SECRET_ACCESS_KEY": "very-secret", "AWS_DEFAULT_REGION": "us-east-1"}
    yield {"PYTHON": str(s3_python), "AWS_ENDPOINT_URL": url, "NODE_SILENCE": "4", "NPROC_PER_NODE": "2", **names}
    server.terminate()
    server.wait()


@slow
def test_s3(s3, launch, environment, rehearse, workdir, tmp_path):
    """All processes of a run are killed, and its folder is lost. The same command logs the losses of an uninterrupted run."""
    flags = [*FLAGS[2:], "--max_steps", "12"]
    run, log = workdir / "runs/in-s3", tmp_path / "log"
    command = ["--tiny", RECIPE, "4gpu_full_shard", "--output_dir", run, "--mirror", "s3://bucket/some/run", *flags]
    with log.open("w") as file:
        words = [ROOT / "launch.sh", *map(str, command)]
        killed = subprocess.Popen(words, cwd=workdir, env=environment | s3, stdout=file, stderr=file, start_new_session=True)
    wait_until(lambda: "checkpoint-4 (" in log.read_text() or killed.poll() is not None, 120, log.read_text)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    shutil.rmtree(run)
    process = launch(*command, **s3)
    assert process.returncode == 0, process.stderr
    assert read(run)["resumed_from_step"] >= 4 and read(run)["mirror"]["failed"] == {}
    assert losses(run) == losses(rehearse(RECIPE, "4gpu_full_shard", *flags, NPROC_PER_NODE="2"))
    assert "The model and 2 checkpoints are in s3://bucket/some/run" in process.stdout
    assert "very-secret" not in process.stdout + process.stderr + log.read_text()
