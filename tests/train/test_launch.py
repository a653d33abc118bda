"""From a command line to exit codes: on one process, and on several under torchrun."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

from megalite.comm import Call
from megalite.comm.observe import seen
from megalite.data import DataError
from megalite.mesh import Axis
from megalite.train import launch
from megalite.train.config import LinkConfig
from megalite.train.finite import NotFiniteError
from megalite.train.guard import SIGNALS
from megalite.train.strict import ConfigError
from tests.train.composing import CONFIGS, ROOT
from tests.train.forked import Job
from tests.train.test_place import TORCHRUN

# A job that shows where it runs and talks in two steps. In step 2 the last rank fails by the seed: 13 raises, 14 has
# bad data, 15 never comes, 16 raises in the first attempt only.
JOB = f"""
import os, time
from megalite.train import launch

def main(config, world):
    import torch
    from megalite.comm import start_all_reduce
    from megalite.data import DataError
    from megalite.mesh import Mesh
    mesh = Mesh.build(config.layout.fit(world.size))
    ranks = start_all_reduce(torch.ones(()), mesh.world).wait()
    at = f"tp={{config.layout.tp}}, seed={{config.seed}}, {{config.out_dir}}"
    print(f"rank {{world.rank}}: {{ranks:.0f}} ranks, {{at}}\\n", end="", flush=True)
    for step in (1, 2):
        world.at(step)
        if step == 2 and world.rank == world.size - 1:
            if config.seed == 13 or config.seed == 16 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                raise RuntimeError("bad luck")
            if config.seed == 14:
                raise DataError("data.paths: bad data")
            if config.seed == 15:
                time.sleep(1000)
        start_all_reduce(ranks, mesh.world).wait()  # nobody fails before all have spoken

if __name__ == "__main__":
    launch.run(main, configs={str(CONFIGS)!r})
"""


@pytest.fixture
def job(tmp_path) -> Path:
    path = tmp_path / "job.py"
    path.write_text(JOB)
    return path


def start(*command: str, cwd: Path) -> subprocess.Popen:
    environment = {key: value for key, value in os.environ.items() if key not in TORCHRUN}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *command], cwd=cwd, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def torchrun(ranks: int, job: Path, *overrides: str, restarts: int = 0) -> subprocess.Popen:
    options = (f"--nproc-per-node={ranks}", f"--max-restarts={restarts}", "--monitor-interval=0.1")
    launcher = ("-m", "torch.distributed.run", "--standalone", *options)
    return start(*launcher, str(job), *overrides, cwd=job.parent)


def finished(process: subprocess.Popen) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=100)
    return process.returncode, out, err


def exit_code(monkeypatch, tmp_path, main, *overrides: str) -> int:
    """What `python train.py <overrides>` would exit with, here and now, with `main` in the place of training."""
    monkeypatch.setattr(sys, "argv", ["train.py", *overrides])
    monkeypatch.chdir(tmp_path)
    for name in (*TORCHRUN, "HYDRA_FULL_ERROR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    threads = torch.get_num_threads()
    handlers = {signum: signal.getsignal(signum) for signum in SIGNALS}
    with pytest.raises(SystemExit) as stop:
        launch.run(main, configs=str(CONFIGS))
    torch.set_num_threads(threads)
    for signum, handler in handlers.items():  # a process that has failed ignores them, since it is to exit
        signal.signal(signum, handler)
    return stop.value.code


@pytest.mark.parametrize("overrides", [[], ["data.paths=[a.txt]"]])
@pytest.mark.parametrize("cache", [None, "/scratch"])
def test_a_user_without_a_home_has_a_cache(monkeypatch, tmp_path, overrides, cache):
    def unknown():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", unknown)
    seen = []
    setting = monkeypatch.setenv
    monkeypatch.setattr(monkeypatch, "setenv", lambda name, value: setting(name, cache or ""))
    assert exit_code(monkeypatch, tmp_path, lambda config, world: seen.append(world.cache_dir), *overrides) == 0
    assert seen == [Path(cache or launch.home_or_stand_in() / ".cache") / "megalite"]
    assert launch.home_or_stand_in().parent == Path(tempfile.gettempdir())


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ("optim.lrr=1", "error: optim.lrr is no key of the configuration; did you mean optim.lr?"),
        ("lr=1", "error: lr is no key of the configuration; did you mean optim.lr?"),
        ("optimm.lr=1", "error: optimm is no key of the configuration; did you mean optim?"),
        ("modle=gpt2", "error: modle is no key of the configuration; did you mean model?"),
        ("model=gpt3", "error: model=gpt3 is unknown; did you mean gpt2?"),
        (
            "precision=[fp32,bf16]",
            "error: precision=[fp32,bf16] is not one choice; take precision=... with one of them",
        ),
        ("+optim.lrr=1", "error: optim.lrr is no key of the configuration; did you mean optim.lr?"),
        ("model=mlp model.vocab_size=9", "error: model.vocab_size is a key of another kind of model; leave it out"),
        ("data.paths={a:1}", "error: data.paths must be a list, such as data.paths=[...]"),
        ("steps=true", "error: steps=true must be a whole number"),
        ("steps=???", "error: Missing mandatory value: steps"),
        ("seed=${nothing}", "error: Interpolation key 'nothing' not found"),
        ("a=b=c", "error: a=b=c is not understood: mismatched input '='"),
        ("out_dir=", "error: out_dir= names no folder; take a path such as out_dir=runs/mine"),
        ("out_dir=null", "error: out_dir=null names no folder; take a path"),
        ("-m out_dir= seed=1,2", "error: out_dir= names no folder; take a path"),
        ("out_dir=/proc/nowhere", "error: out_dir: "),
        ("layout.tp=2", "error: layout cp=1 x tp=2 x pp=1 = 2 does not divide the 1 rank that is running"),
        ("layout.cp=2", "error: layout.cp=2 is not built yet; take layout.cp=1"),
        ("-m steps=0,1", "error: steps=0 must be above 0"),
    ],
)
def test_what_the_command_line_gets_wrong_is_one_line_and_exit_code_2(monkeypatch, tmp_path, capfd, overrides, says):
    code = exit_code(monkeypatch, tmp_path, lambda config, world: pytest.fail("it ran"), *overrides.split())
    err = [line for line in capfd.readouterr().err.splitlines() if not line.startswith(("Launching", "\t#"))]
    assert code == 2
    assert len(err) == 1 and err[0].startswith(says)


def test_the_exit_code_says_what_went_wrong(monkeypatch, tmp_path, capfd):
    def failing(error):
        def main(config, world):
            raise error

        return main

    assert exit_code(monkeypatch, tmp_path, lambda config, world: None) == 0
    assert exit_code(monkeypatch, tmp_path, failing(DataError("data.paths: gone"))) == 3
    assert capfd.readouterr().err == "error: data.paths: gone\n"
    assert exit_code(monkeypatch, tmp_path, failing(NotFiniteError("non-finite: lost"))) == 5
    assert capfd.readouterr().err == "error: non-finite: lost\n"
    assert exit_code(monkeypatch, tmp_path, failing(ValueError("a bug"))) == 1
    assert "Traceback" in (err := capfd.readouterr().err) and "ValueError: a bug" in err
    assert exit_code(monkeypatch, tmp_path, failing(KeyboardInterrupt())) == 130


def test_each_job_of_a_sweep_has_its_own_directory_and_relative_data_is_where_one_typed(monkeypatch, tmp_path):
    seen = []

    def main(config, world):
        seen.append((config.seed, Path(config.out_dir), config.data.paths))

    assert exit_code(monkeypatch, tmp_path, main, "-m", "seed=1,2", "out_dir=sweep") == 0
    assert seen == [(1, tmp_path / "sweep/0", []), (2, tmp_path / "sweep/1", [])]
    seen.clear()
    assert exit_code(monkeypatch, tmp_path, main, "data.paths=[a.txt]", "out_dir=run", "hydra.job.chdir=true") == 0
    assert seen == [(0, tmp_path / "run", [str(tmp_path / "a.txt")])]


def test_every_relative_path_of_data_is_where_one_typed(monkeypatch, tmp_path):
    seen = []
    overrides = ("data.phases=[{from_step:3,paths:[b,/c]}]", "data.validation_paths=[d]", "hydra.job.chdir=true")
    assert exit_code(monkeypatch, tmp_path, lambda config, world: seen.append(config.data), *overrides) == 0
    assert [phase.paths for phase in seen[0].phases] == [[str(tmp_path / "b"), "/c"]]
    assert seen[0].validation_paths == [str(tmp_path / "d")]


def test_libraries_say_warnings_and_no_more(monkeypatch, tmp_path, capfd):
    def main(config, world):
        logging.getLogger("library").info("by the way")
        logging.getLogger("library").warning("beware")

    assert exit_code(monkeypatch, tmp_path, main) == 0
    assert capfd.readouterr().err == "[WARNING] library: beware\n"


@pytest.mark.parametrize(
    ("overrides", "threads"), [([], 3), (["cluster.threads=2"], 2)], ids=["as OMP_NUM_THREADS says", "as configured"]
)
def test_threads_are_what_was_asked_for(monkeypatch, tmp_path, overrides, threads):
    seen = []
    monkeypatch.setattr(sys, "argv", ["train.py", *overrides])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    before = torch.get_num_threads()
    with pytest.raises(SystemExit):
        launch.run(lambda config, world: seen.append((world.threads, torch.get_num_threads())), configs=str(CONFIGS))
    torch.set_num_threads(before)
    assert seen == [(threads, threads)]


def test_a_link_slows_what_crosses_its_axis_and_is_refused_on_a_gpu():
    call = Call("all_reduce", Axis("tp", 2), 10**6)  # of which a ring of two sends all
    for link, least in ((LinkConfig("tp", bandwidth_gb_per_sec=0.1, latency_ms=40), 0.05), (LinkConfig(), 0.0)):
        with launch.network(link, "cpu"):
            began = time.perf_counter()
            for before, after in (("issuing", "issued"), ("waiting", "waited")):
                with seen(call, before, after):
                    pass
            assert least <= time.perf_counter() - began <= least + 0.04
    with pytest.raises(ConfigError, match=r"link\.axis=tp slows ranks on the CPU, and this is cuda:0"):
        launch.network(LinkConfig("tp"), "cuda:0")


def test_help_and_a_refusal_import_no_torch():
    for argument, code in [("--help", 0), ("steps=0", 2)]:
        process = start("-X", "importtime", str(ROOT / "train.py"), argument, cwd=ROOT)
        returned, _, err = finished(process)
        assert returned == code
        imported = re.findall(r"\| +(\S+)$", err, flags=re.MULTILINE)
        assert "hydra" in imported and not [name for name in imported if name.split(".")[0] == "torch"]


def test_under_torchrun_a_refusal_is_said_once(job):
    code, out, err = finished(torchrun(2, job, "optim.lrr=1"))
    assert code != 0 and out == ""
    assert err.count("error: ") == 1 and "error: optim.lrr is no key of the configuration" in err
    assert "exitcode  : 2" in err


def test_two_jobs_at_once_do_not_meet_and_an_error_on_one_rank_ends_its_job_and_is_told(job):
    """One is a sweep, which makes its process group anew for each of its jobs."""
    at = job.parent
    one = torchrun(2, job, "layout.tp=2", "seed=14", "out_dir=a")
    sweep = torchrun(2, job, "-m", "seed=8,13", "out_dir=b")
    code, out, err = finished(one)
    assert sorted(out.splitlines()) == [f"rank {rank}: 2 ranks, tp=2, seed=14, {at}/a" for rank in range(2)]
    assert code != 0 and err.count("error: ") == 1 and "error: data.paths: bad data" in err
    assert "exitcode  : 3" in err
    code, out, err = finished(sweep)
    done = [f"rank {rank}: 2 ranks, tp=1, seed={(8, 13)[n]}, {at}/b/{n}" for rank in range(2) for n in range(2)]
    assert sorted(out.splitlines()) == sorted(done)
    assert code != 0 and "rank 1 failed in step 2:\nTraceback" in err and "RuntimeError: bad luck" in err
    assert "exitcode  : 1" in err


def test_a_restart_begins_anew_after_the_failure_of_one_rank_and_nothing_leaks(job):
    """The launcher's --max-restarts: the second attempt meets under a prefix of its own."""
    process = torchrun(4, job, "seed=16", "out_dir=run", restarts=1)
    code, out, err = finished(process)
    assert code == 0
    assert len(out.splitlines()) == 8 and len(set(out.splitlines())) == 4  # each rank in both attempts
    assert err.find("Traceback") == err.index("rank 3 failed in step 2:\nTraceback") + len("rank 3 failed in step 2:\n")
    assert not [word for word in ("destroy_process_group", "leaked", "resource_tracker") if word in err]


def test_under_torchrun_a_hang_ends_the_job_and_is_what_its_report_shows(job):
    process = torchrun(2, job, "seed=15", "out_dir=run", "cluster.timeout_seconds=3")
    code, _, err = finished(process)
    assert code != 0 and err.startswith("hang in step 2: all_reduce over world (ranks 0, 1), its number 3")
    assert "rank 1 did not come" in err and "exitcode  : 4" in err
    shown = err.partition("Root Cause")[2]
    assert "rank      : 0" in shown and "hang in step 2" in shown  # it has the report; 1 was ended by it


def test_ranks_that_start_apart_share_one_folder_and_find_data_where_it_was_typed(tmp_path):
    """Also where Hydra changes the directory."""

    def main(config, world):
        (text,) = config.data.paths
        Path(config.out_dir, f"rank{world.rank}").write_text(Path(text).read_text())

    (tmp_path / "a.txt").write_text("found")
    overrides = ("data.paths=[a.txt]", "hydra.job.chdir=true")
    job = Job(main, 2, *overrides, folder=tmp_path, before=lambda rank: time.sleep(2 * rank))
    assert job.codes() == [0, 0] and job.err() == ""
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("rank*"))
    assert left == ["runs/default/rank0", "runs/default/rank1"]
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["default"]
    assert {path.read_text() for path in tmp_path.rglob("rank*")} == {"found"}
