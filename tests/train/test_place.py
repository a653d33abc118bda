"""Where a launcher has put a rank, and the device that it gets there."""

from __future__ import annotations

import pytest

from megalite.train.config import ClusterConfig, Config
from megalite.train.place import Place, choose_device
from megalite.train.strict import ConfigError

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "there",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "OMP_NUM_THREADS": "1",
}


def test_without_a_launcher_it_is_one_process_and_no_group():
    assert Place.read({}) == Place()


def test_under_torchrun_the_place_is_what_it_says_and_its_one_thread_is_nobodys_wish():
    place = Place.read(TORCHRUN)
    assert (place.rank, place.size, place.local_rank, place.local_size) == (3, 4, 1, 2)
    assert (place.master, place.agent_store, place.attempt) == (("there", 29400), True, 2)
    assert place.omp_threads is None
    assert Place.read(TORCHRUN | {"OMP_NUM_THREADS": "5"}).omp_threads == 5
    assert Place.read({"OMP_NUM_THREADS": "1"}).omp_threads == 1


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"RANK": "4"}, "RANK=4 is not below WORLD_SIZE=4"),
        ({"MASTER_ADDR": None}, "WORLD_SIZE=4 is set and MASTER_ADDR is not; start with torchrun"),
        ({"RANK": None}, "WORLD_SIZE=4 is set and RANK is not"),
    ],
)
def test_half_a_launcher_is_refused(variables, says):
    environ = {key: value for key, value in (TORCHRUN | variables).items() if value is not None}
    with pytest.raises(ValueError, match=says):
        Place.read(environ)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WORLD_SIZE", "x"),
        ("RANK", "-1"),
        ("LOCAL_RANK", "1.5"),
        ("LOCAL_WORLD_SIZE", ""),
        ("MASTER_PORT", "abc"),
        ("MASTER_PORT", "65536"),
        ("OMP_NUM_THREADS", "100000000000"),
    ],
)
def test_a_variable_that_does_not_count_is_refused_with_its_name_and_value(name, value):
    with pytest.raises(ValueError, match=f"^{name}={value} must be a whole number from 0 to "):
        Place.read(TORCHRUN | {name: value})


@pytest.mark.parametrize(
    ("gpus", "asked", "local", "found"),
    [
        (0, ("auto", "auto"), (3, 4), ("cpu", "gloo")),
        (4, ("auto", "auto"), (3, 4), ("cuda:3", "nccl")),
        (2, ("auto", "auto"), (3, 4), ("cuda:1", "gloo")),
        (4, ("cuda", "gloo"), (3, 4), ("cuda:3", "gloo")),
        (4, ("cpu", "auto"), (3, 4), ("cpu", "gloo")),
        (0, ("cuda", "auto"), (0, 1), "cluster.device=cuda needs a GPU, and rank 0 sees none"),
        (2, ("auto", "nccl"), (3, 4), "a GPU for each of the 4 local ranks, and cluster.device=auto gives them 2"),
        (4, ("cpu", "nccl"), (3, 4), "a GPU for each of the 4 local ranks, and cluster.device=cpu gives them 0"),
    ],
)
def test_nccl_is_chosen_where_each_rank_has_a_gpu_of_its_own_and_refused_elsewhere(gpus, asked, local, found):
    config = Config(cluster=ClusterConfig(device=asked[0], backend=asked[1]))
    place = Place(local_rank=local[0], local_size=local[1])
    if isinstance(found, tuple):
        assert choose_device(config, place, gpus=gpus) == found
    else:
        with pytest.raises(ConfigError, match=found):
            choose_device(config, place, gpus=gpus)
