"""What torchrun, mpirun and srun say of a process, and the command that runs a rank."""

from __future__ import annotations

import pytest

from backend.api import ConfigError
from backend.api.processes.launched import Launched, launched, rank_0_of
from deploy.doctor import ranks
from deploy.errors import UserError
from deploy.rank import RankOptions, command_of

AT = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
TORCHRUN = AT | {"RANK": "1", "WORLD_SIZE": "4"}
NAMES = [
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
]


@pytest.mark.parametrize("of_rank, of_number", NAMES)
def test_every_launcher_is_understood(of_rank: str, of_number: str) -> None:
    found = launched(AT | {of_rank: "2", of_number: "3"})
    assert found == Launched(2, 3, "10.0.0.1:29500")


def test_torchrun_itself_listens_at_the_port_that_it_names() -> None:
    found = launched(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert found == Launched(1, 4, "10.0.0.1:29501")


def test_a_process_that_nobody_has_counted() -> None:
    assert launched(AT | {"RANK": "1"}) is None
    with pytest.raises(ConfigError, match="none of RANK, .* write HOST:PORT"):
        rank_0_of({})


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"RANK": "4"}, "RANK is '4', allowed is 0 to 3"),
        ({"RANK": "-1"}, "RANK is '-1'"),
        ({"RANK": ""}, "RANK is ''"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0', allowed is 1 to 1024"),
        ({"WORLD_SIZE": "9" * 5000}, "WORLD_SIZE is '9+\\.\\.\\.'"),
        ({"MASTER_PORT": "65535"}, "MASTER_PORT is '65535', allowed is 1 to 65534"),
        ({"MASTER_ADDR": "a host"}, "MASTER_ADDR and MASTER_PORT is 'a host:29500'; write HOST:PORT"),
        ({"MASTER_ADDR": ""}, "not known where rank 0 is"),
    ],
)
def test_numbers_and_addresses_that_are_none(changed: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        launched(TORCHRUN | changed)


def test_rank_0_alone_leads() -> None:
    assert rank_0_of(TORCHRUN | {"RANK": "0"}).num_ranks == 4
    with pytest.raises(ConfigError, match="rank 1 of 4, and rank 0 alone takes requests; run ./everbatch rank here"):
        rank_0_of(TORCHRUN)
    with pytest.raises(UserError, match="this process is rank 0, which leads"):
        command_of(RankOptions(), TORCHRUN | {"RANK": "0"})


def test_the_command_of_a_rank() -> None:
    by_hand = command_of(RankOptions("10.0.0.1:29500", 5.0), {})
    assert by_hand[3:] == ["--timeout", "5", "--join", "10.0.0.1:29500"]
    assert command_of(RankOptions(), TORCHRUN)[-6:] == ["--join", "10.0.0.1:29500", "--rank", "1", "--num-ranks", "4"]
    for options, said in (
        (RankOptions(), "the address of rank 0 is missing"),
        (RankOptions("nowhere"), "write HOST:PORT"),
    ):
        with pytest.raises(UserError, match=said):
            command_of(options, {})


def test_the_doctor_looks_at_what_ranks_of_several_machines_need() -> None:
    assert ranks({}) == []
    (counted, key) = ranks(TORCHRUN | {"EVERBATCH_RANK_KEY": "short"})
    assert (counted.state, key.state) == ("ok", "fail")
    assert counted.seen == "this process is rank 1 of 4; rank 0 is at 10.0.0.1:29500"
    assert "16 characters" in key.remedy
    (wrong,) = ranks({"RANK": "7", "WORLD_SIZE": "2"})
    assert wrong.state == "fail" and "RANK is '7'" in wrong.seen
    (key,) = ranks({"EVERBATCH_RANK_KEY": "long enough for a key"})
    assert key.state == "ok" and "long" not in key.seen
