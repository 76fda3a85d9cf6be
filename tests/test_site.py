"""The site file of a cluster, and what Slurm's commands say, read."""

import pytest
import yaml

from erpo.config import SITE_FILE, Site, load_site, parse_site
from erpo.slurm import Cluster, Queue, Request, faults, parse_gres, parse_limit, request_of
from tests.conftest import ROOT


def test_the_shipped_site_file_sets_nothing_but_the_study():
    assert load_site(ROOT / SITE_FILE) == Site()
    settings = yaml.safe_load((ROOT / SITE_FILE).read_text())
    assert settings["study"] == "paper"
    assert set(settings) == {"study", *Site.model_fields}, "every setting is shown to the user"


def test_the_command_line_wins_over_the_file(tmp_path):
    path = tmp_path / "site.yaml"
    path.write_text("partition: cpu\naccount: 4711\nnodes: {large: 2}\n")
    site = load_site(path, account="mine", gpu_type="h100")
    assert (site.partition, site.account, site.gpu_type, site.nodes.large, site.nodes.medium) == ("cpu", "mine", "h100", 2, 1)
    assert load_site(path).account == "4711"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("partitions: gpu", "unknown key partitions; there are: study, partition, gpu_partition"),
        ("gpus_per_node: 0", "gpus_per_node: Input should be greater than 0, found 0"),
        ("nodes: {huge: 2}", "nodes.huge: unknown; there are: small, medium, large"),
        ("nodes: two", "nodes: must be numbers by size of model, such as {medium: 1, large: 2}, found 'two'"),
        ("constraint: a100 --nodes=9", "constraint: this cannot be a name of Slurm's"),
        ("- gpu", "expected lines of the form key: value"),
        ("", "expected lines of the form key: value"),
        ("partition: [", "expected the node content"),
        ("partition: a\npartition: b", "line 1: the key 'partition' is given twice"),
        ("1: a", "unknown key 1; there are"),
    ],
)
def test_a_fault_in_the_site_file_is_one_sentence(tmp_path, text, sentence):
    path = tmp_path / "site.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"site\.yaml: ") as refused:
        load_site(path)
    assert sentence in str(refused.value)


def test_a_site_file_that_is_missing_is_said(tmp_path):
    with pytest.raises(ValueError, match=r"site\.yaml: cannot be read \(No such file"):
        load_site(tmp_path / "site.yaml")


def test_a_fault_of_the_command_line_is_not_told_of_the_file(tmp_path):
    path = tmp_path / "site.yaml"
    path.write_text("partition: cpu\n")
    with pytest.raises(ValueError, match=r"^--config: gpus_per_node: .*found 0"):
        load_site(path, gpus_per_node=0)


def test_numbers_from_a_command_line_are_numbers_of_nodes():
    assert parse_site({"nodes": {"medium": "2"}, "study": "paper"}).nodes.medium == 2


def test_jobs_with_gpus_have_a_partition_of_their_own():
    site = Site(partition="cpu", gpu_partition="gpu")
    assert (site.partition_for(0), site.partition_for(8)) == ("cpu", "gpu")
    assert Site(partition="all").partition_for(8) == "all"
    assert Site().partition_for(1) is None


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("1-00:00:00", 1440), ("2-12:30:00", 3630), ("5:00", 5), ("0:30", 1), ("2:00:00", 120), ("infinite", None), ("n/a", None)],
)
def test_limits_of_slurm_in_minutes(text, minutes):
    assert parse_limit(text) == minutes


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("gpu:a100:4(S:0-1)", {"a100": 4}),
        ("gpu:8", {"": 8}),
        ("gpu:a100:4,gpu:h100_80gb:2", {"a100": 4, "h100_80gb": 2}),
        ("(null)", {}),
        ("shard:8", {}),
    ],
)
def test_gpus_of_a_node(text, gpus):
    assert parse_gres(text) == gpus


def queue(name="gpu", **changes) -> Queue:
    shape = {"is_default": False, "is_up": True, "max_minutes": 1440, "cpus": 64, "memory_mb": 500_000}
    return Queue(name, **{**shape, "gpus": {"a100": 8}, "features": frozenset({"nvlink"}), "nodes": 4, **changes})


CLUSTER = Cluster((queue(), queue("cpu", is_default=True, gpus={})), frozenset({"lab"}), frozenset({"normal"}))


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        (Request("train", partition="gpus"), "partition 'gpus' does not exist; there are: gpu, cpu"),
        (Request("train", account="me"), "account 'me' is not yours; there are: lab"),
        (Request("train", qos="high"), "qos 'high' is not yours; there are: normal"),
        (Request("train", "gpu", gpu_type="h100", gpus=8), "gpu_type 'h100' does not exist; there are: a100"),
        (Request("train", constraint="ib"), "constraint 'ib' is no feature of a node; there are: nvlink"),
        (Request("train", gpus=8), "train: partition cpu has at most 0 GPUs on a node, asked are 8"),
        (
            Request("train", "gpu", minutes=2880),
            "train: partition gpu allows 1440 minutes, asked are 2880; --set-resources train:runtime=1440",
        ),
        (Request("train", "gpu", nodes=5), "train: partition gpu has 4 nodes, asked are 5"),
        (Request("score", cpus=128), "score: partition cpu has at most 64 cores on a node, asked are 128"),
        (Request("train", "gpu", memory_mb=600_000), "train: partition gpu has at most 500000 MB on a node, asked are 600000"),
    ],
)
def test_what_a_cluster_does_not_have_is_said_with_what_it_has(request_, sentence):
    assert sentence in faults([request_], CLUSTER)


def test_what_a_cluster_has_is_no_fault():
    fine = Request("train", "gpu", "LAB", "normal", "nvlink&ssd", "a100", gpus=8, nodes=4, minutes=1440, cpus=64, memory_mb=500_000)
    assert faults([fine, Request("score"), Request("score", "gpu,cpu")], CLUSTER) == []


def test_a_partition_that_is_down_is_said():
    assert faults([Request("train", "gpu")], Cluster((queue(is_up=False),))) == ["train: partition gpu is down"]


def test_an_account_where_nobody_counts_is_said():
    assert "keeps no accounts" in faults([Request("train", account="me")], Cluster((queue(is_default=True),)))[0]


def test_a_job_asks_per_node():
    spread = {"gres": "gpu:a100:8", "nodes": 2, "tasks_per_node": 8, "cpus_per_task": 4, "mem_mb": 100, "runtime": 60}
    assert request_of("train", spread, threads=32) == Request(
        "train", gpu_type="a100", gpus=8, nodes=2, minutes=60, cpus=32, memory_mb=100
    )
    single = {"gpu": 8, "gpu_model": "h100", "slurm_partition": "gpu"}
    assert request_of("train", single, threads=32) == Request("train", "gpu", gpu_type="h100", gpus=8, cpus=32)
