"""On two nodes of a SLURM allocation, ranks prepare what one process prepares, and what goes wrong on a node is told."""

import json
import os
import signal
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cluster
import pytest
from conftest import needs
from made import check_hashes
from test_launch import PYTHON, SMALL, Watcher, left, mark, shards, shrink, stand_in, until, work

__all__ = ["mark"]
PATIENCE_S = 300


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[cluster.Cluster]:
    needs("SLURM", cluster.available())
    with cluster.two_nodes(tmp_path_factory.mktemp("cluster")) as running:
        yield running


def run(running: cluster.Cluster, what: str, folder: Path) -> dict[str, Any]:
    """Call a function of this file in an allocation, and return what it returns."""
    done = running.run([PYTHON, __file__, what, str(folder)], timeout=PATIENCE_S)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return json.loads((folder / "result.json").read_text())


def test_two_nodes_prepare_what_one_process_prepares(two_nodes: cluster.Cluster, tmp_path: Path, mark: str) -> None:
    result = run(two_nodes, "prepare_together", tmp_path)
    assert result["two"] == result["one"]
    assert result["ranks"] == ["rank 0 of 2", "rank 1 of 2"] * 2
    assert "Encode" in result["log of rank 1"]
    until(lambda: not left(mark))


def prepare_together(folder: Path) -> dict[str, Any]:
    """Prepare on both nodes, and in this process alone."""
    from sdlab import prepare

    shrink(setattr)
    say = "rank {RANK} of {WORLD_SIZE}"
    sys.executable = stand_in(folder / "python", f"print('{say}'.format(**os.environ), file=open('{folder}/ranks', 'a'))\n{SMALL}")
    given = {"source": "scenes", "resolution": 16, "limit": 60, "num_workers": 0}
    two = prepare.prepare(prepare.configure(**given, data_dir=str(folder / "two"), num_nodes=2))
    check_hashes(folder / "two", two, 16)
    one = prepare.prepare(prepare.configure(**given, data_dir=str(folder / "one")))
    ranks = (folder / "ranks").read_text().splitlines()
    ranks = sorted(ranks[:2]) + sorted(ranks[2:])
    return {"one": shards(one), "two": shards(two), "ranks": ranks, "log of rank 1": (folder / "two/index/job/rank-1.log").read_text()}


def test_ranks_share_the_cpus_and_what_goes_wrong_on_a_node_is_told(two_nodes: cluster.Cluster, tmp_path: Path, mark: str) -> None:
    result = run(two_nodes, "go_wrong", tmp_path)
    first, second = result["ranks"][0][-1], result["ranks"][3][-1]
    said = [f"rank {rank} of 4, {rank % 2}, {cluster.CPUS // 2} CPUs, on node {first if rank < 2 else second}" for rank in range(4)]
    assert result["ranks"] == said and {first, second} == {"0", "1"}
    assert result["shown while it works"] == "nothing"
    assert result["config error"] == "ConfigError: the sentence"
    assert result["error"].startswith("RuntimeError: rank 1 failed:\nTraceback") and "ZeroDivisionError" in result["error"]
    assert result["killed"].startswith("RuntimeError: rank 1 was ended by SIGKILL (out of memory?)")
    assert f"{tmp_path}/elsewhere is not there on" in result["folder on one node"]
    assert result["too many nodes"].startswith("ConfigError: num_nodes=3, and this process may use 2:")
    assert result["too many ranks"].startswith("ConfigError: devices=9, and the SLURM allocation has 8 CPUs on a node")
    assert result["interrupted"].startswith("KeyboardInterrupt")
    until(lambda: not left(mark))


def go_wrong(folder: Path) -> dict[str, Any]:
    """Jobs that go wrong in several ways, by what is told of them."""
    from sdlab import launch

    def attempt(body: str, *, devices: int = 1, num_nodes: int = 2, supervisor: str = "") -> str:
        sys.executable = stand_in(folder / "python", body, supervisor)
        try:
            launch.run_ranks(folder / "job", {"verb": "prepare"}, launch.Ranks(devices, num_nodes))
        except BaseException as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    names = "rank {RANK} of {WORLD_SIZE}, {LOCAL_RANK}, {OMP_NUM_THREADS} CPUs, on node {SLURM_NODEID}"
    say = f'open(f"{folder}/rank-{{rank}}", "w").write("{names}".format(**os.environ))'
    os.environ.update(RANK="7", LOCAL_RANK="7", WORLD_SIZE="7")
    os.environ.pop("OMP_NUM_THREADS", None)
    attempt(work(say), devices=2)
    result: dict[str, Any] = {"ranks": [path.read_text() for path in sorted(folder.glob("rank-*"))]}
    terminal, sys.stderr = sys.stderr, Watcher(folder / "seen")
    result["shown while it works"] = attempt(work(Watcher.SHOW))
    sys.stderr = terminal
    result["config error"] = attempt(work("if rank: raise ConfigError('the sentence')\ntime.sleep(1000)"))
    result["error"] = attempt(work("if rank: 1 / 0\ntime.sleep(1000)"))
    result["killed"] = attempt(work("if rank: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(1000)"))
    result["folder on one node"] = attempt(
        work("pass"), supervisor=f"if os.environ['SLURM_NODEID'] == '1': sys.argv[-1] = '{folder}/elsewhere'"
    )
    result["too many nodes"] = attempt(work("pass"), num_nodes=3)
    result["too many ranks"] = attempt(work("pass"), devices=9)
    wait = """
    (folder / f"here-{rank}").touch()
    while len([*folder.glob("here-*")]) < 2:
        time.sleep(0.01)
    if not rank:
        os.kill(STARTER, signal.SIGINT)
    time.sleep(1000)
    """
    result["interrupted"] = attempt(work(wait.replace("STARTER", str(os.getpid()))))
    (folder / "job/here-1").unlink()
    os.environ["TEST_MARK"] = mark_of_ranks = uuid.uuid4().hex
    starter = os.fork()
    if not starter:
        attempt(work(wait.replace("STARTER", "os.getpid()").replace("SIGINT", "SIGCONT")))
        os._exit(0)
    until(lambda: len([*(folder / "job").glob("here-*")]) == 2)
    os.kill(starter, signal.SIGKILL)
    os.waitpid(starter, 0)
    until(lambda: not left(mark_of_ranks))
    return result


if __name__ == "__main__":
    where = Path(sys.argv[2])
    (where / "result.json").write_text(json.dumps(globals()[sys.argv[1]](where)))
