"""Who the workers are, told by MPI: on three real ranks, and of hosts that are made up."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
from _mpi_alone import saved

from tests.mpi_processes import MpiLaunch, why_not
from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.distribute import _mpi_cluster
from tf_largebatch.distribute._mpi_cluster import warn_of_few_cores

needs_mpi = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
SCRIPT = Path(__file__).parent / "_mpi_cluster_script.py"


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("cluster")
    ended = MpiLaunch(str(SCRIPT), str(folder), num_ranks=3).wait(60.0)
    results = saved(folder)
    assert len(results) == 3, ended.log
    return results


def of(by_rank: list[Any], case: str) -> list[dict[str, Any]]:
    return [results[case] for results in by_rank]


@needs_mpi
@pytest.mark.parametrize("case", ["alone in the environment", "once more", "empty"])
def test_ranks_of_one_host_meet_at_free_ports(by_rank: list[Any], case: str) -> None:
    ends = of(by_rank, case)
    assert [end["rank"] for end in ends] == [0, 1, 2]
    (addresses,) = {end["addresses"] for end in ends}
    hosts, ports = zip(*(address.rsplit(":", 1) for address in addresses), strict=True)
    assert hosts == ("127.0.0.1",) * 3
    assert len(set(ports)) == 3
    assert all(10_000 <= int(port) < 32_768 for port in ports)
    for end in ends:
        assert end["order"] == [(0, 0), (1, 1), (2, 2)]
        assert end["is_own"], "what others send in COMM_WORLD is not mixed up with ours"
        assert end["share_cores"] == (len(os.sched_getaffinity(0)) < 3)
    warned_of = [len(end["warnings"]) for end in ends]
    assert warned_of == [1 if ends[0]["share_cores"] else 0, 0, 0]


@needs_mpi
def test_tf_configs_workers_count(by_rank: list[Any]) -> None:
    ends = of(by_rank, "of TF_CONFIG")
    assert [end["rank"] for end in ends] == [2, 1, 0]
    for end in ends:
        assert end["addresses"] == tuple(f"127.0.0.1:{14_900 + each}" for each in range(3))
        assert end["order"] == [(0, 2), (1, 1), (2, 0)], "a worker's rank is MPI's"
        assert end["is_own"]


@needs_mpi
def test_ports_and_hosts_may_be_given(by_rank: list[Any]) -> None:
    for end in of(by_rank, "with ports"):
        assert end["addresses"] == ("127.0.0.1:21000", "127.0.0.1:21001", "127.0.0.1:21002")
    for end in of(by_rank, "with hosts"):
        hosts = [address.rsplit(":", 1)[0] for address in end["addresses"]]
        assert hosts == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
    for end in of(by_rank, "with IPv6"):
        hosts = [address.rsplit(":", 1)[0] for address in end["addresses"]]
        assert hosts == ["[fd00::1]", "[fd00::2]", "[fd00::3]"]
    (addresses,) = {end["addresses"] for end in of(by_rank, "with one host")}
    assert addresses[1].startswith("10.0.0.9:")
    assert not addresses[0].startswith(("10.0.0.9:", "127.")), "the others are no loopback to it"


@needs_mpi
@pytest.mark.parametrize(
    ("case", "error", "text"),
    [
        ("of two workers", "TopologyError", "TF_CONFIG names 2 workers, but MPI has 3 rank(s)."),
        ("all worker 0", "TopologyError", "say that these are workers [0, 0, 0]; each must be"),
        ("said to be alone", "TopologyError", "TF_CONFIG='{}' says that this process is alone"),
        ("a word as port", "ConfigurationError", "TF_LARGEBATCH_PORT='many', the first port"),
        ("a port too high", "ConfigurationError", "a whole number from 1 to 65532"),
    ],
)
def test_what_does_not_fit_is_refused_on_all_ranks(
    by_rank: list[Any], case: str, error: str, text: str
) -> None:
    for end in of(by_rank, case):
        assert end["error"] == error and text in end["text"]
        assert end["seconds"] < 5.0


@needs_mpi
def test_a_tf_config_of_some_ranks_is_refused_on_all(by_rank: list[Any]) -> None:
    first, *others = of(by_rank, "of one TF_CONFIG")
    assert first["error"] == "TopologyError" and "workers [0, None, None]" in first["text"]
    for other in others:
        assert other["error"] == "TopologyError"
        assert "rank(s) [0] have a TF_CONFIG, and others have none" in other["text"]


@needs_mpi
def test_a_rank_that_does_not_come_is_named(by_rank: list[Any]) -> None:
    for rank in (0, 2):
        end = by_rank[rank]["without one"]
        assert end["error"] == "PeerTimeoutError"
        assert f"Rank {rank} of 3 has waited start_timeout_seconds=0.5" in end["text"]
        assert "rank(s) 1," in end["text"]
        assert 0.5 <= end["seconds"] < 5.0


# --- Without MPI


def fact(host: str, port: int, **more: Any) -> dict[str, Any]:
    plain = {
        "address": f"10.1.1.{len(host)}",
        "is_given": False,
        "first_port": None,
        "cores": [0],
        "worker": None,
    }
    return {"host": host, "port": port, **plain, **more}


def addresses(
    monkeypatch: pytest.MonkeyPatch, facts: list[dict[str, Any]], unknown: list[list[str]]
) -> list[str]:
    """Of made-up hosts; `unknown` are those that each rank says it does not know."""
    monkeypatch.setattr(_mpi_cluster.socket, "gethostname", lambda: facts[0]["host"])
    monkeypatch.setattr(_mpi_cluster, "_is_known", lambda host: host not in unknown[0])
    asked: list[Any] = []

    def exchange(mpi: Any, comm: Any, own: Any, *, timeout_seconds: float) -> list[Any]:
        asked.append(own)
        return [own, *unknown[1:]]

    monkeypatch.setattr(_mpi_cluster, "exchange", exchange)
    return _mpi_cluster._addresses(None, None, facts, 1.0)


def test_hosts_that_all_know_go_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = [fact("one", 11), fact("one", 12), fact("three", 13)]
    assert addresses(monkeypatch, facts, [[], [], []]) == ["one:11", "one:12", "three:13"]


@pytest.mark.parametrize("unknown", [[["three"], [], []], [[], ["three"], []]])
def test_a_host_that_somebody_does_not_know_goes_by_its_address(
    monkeypatch: pytest.MonkeyPatch, unknown: list[list[str]]
) -> None:
    facts = [fact("one", 11), fact("one", 12), fact("three", 13)]
    expected = ["one:11", "one:12", "10.1.1.5:13"]
    assert addresses(monkeypatch, facts, unknown) == expected


def test_a_host_without_name_and_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = [fact("one", 11), fact("three", 13, address="")]
    with pytest.raises(ConfigurationError, match="host\\(s\\) three is not known to the others"):
        addresses(monkeypatch, facts, [["three"], []])


def test_a_given_host_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = [fact("one", 11, is_given=True, address="head"), fact("three", 13)]
    assert addresses(monkeypatch, facts, [[], []]) == ["head:11", "three:13"]


def test_given_ports_count_on_each_host() -> None:
    facts = [fact(host, 1, first_port="2222") for host in ("one", "three", "one", "three", "one")]
    assert _mpi_cluster._ports(facts) == [2222, 2222, 2223, 2223, 2224]


@pytest.mark.parametrize("given", ["0", "-1", "1.5", "65534", "x"])
def test_a_port_that_is_none_is_refused(given: str) -> None:
    with pytest.raises(ConfigurationError, match="must be a whole number from 1 to 65533"):
        _mpi_cluster._ports([fact("one", rank, first_port=given) for rank in range(2)])


def test_ports_that_some_ranks_were_given_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"\[None, '2222'\]; it must be the same on all"):
        _mpi_cluster._ports([fact("one", 11), fact("one", 12, first_port="2222")])


def test_without_given_ports_each_rank_has_its_own() -> None:
    assert _mpi_cluster._ports([fact("one", 11), fact("one", 12)]) == [11, 12]


def warned(facts: list[dict[str, Any]], rank: int) -> tuple[bool, list[str]]:
    """Whether the ranks of this one's host share cores, and what is warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        share_cores = warn_of_few_cores(facts, rank) < 1
    return share_cores, [str(each.message) for each in caught]


def test_more_ranks_than_cores_are_warned_of_once_a_host() -> None:
    crowded = [fact("one", 1, cores=[0, 1]) for _ in range(3)]
    roomy = [fact("two", 1, cores=[4, 5]), fact("two", 1, cores=[6])]
    facts = [*crowded, *roomy]
    share_cores, (text,) = warned(facts, 0)
    assert share_cores
    assert "3 MPI ranks share the 2 core(s) they may use on one" in text
    assert [warned(facts, rank) for rank in (1, 2)] == [(True, [])] * 2
    assert [warned(facts, rank) for rank in (3, 4)] == [(False, [])] * 2


def test_ranks_bound_to_one_core_each_are_fine() -> None:
    assert warned([fact("one", 1, cores=[core]) for core in range(4)], 0) == (False, [])
    assert warned([fact("one", 1, cores=[7]) for _ in range(2)], 0)[0]
