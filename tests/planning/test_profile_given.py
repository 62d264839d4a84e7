"""`profile=` of `dshard.plan` and of `cluster_of`: a profile, its path, or the one that is shipped."""

import json
from importlib.resources import files

import pytest
import torch
from torch import nn

import dshard
from dshard.errors import ArgumentError, PlanError
from dshard.planner import DEVICES, Rates, cluster_of, published
from dshard.planning.plan import Profile

H100 = DEVICES["h100-80g"]
FILE = files("dshard.planner") / "rates.json"  # that is shipped


def shipped(name):
    return json.loads(FILE.read_text())["constants"][name]["value"]


def model():
    with torch.device("meta"):
        return nn.Sequential(*[nn.Linear(512, 512) for _ in range(3)])


def planned(**given):
    given = {"cluster": cluster_of(H100, 16, profile=given.get("profile")), "device": H100, **given}
    return dshard.plan(model(), torch.empty(64, 512, device="meta"), **given)


def test_a_profile_is_given_as_itself_as_its_path_or_by_the_name_of_the_shipped_one(tmp_path):
    path = tmp_path / "profile.json"
    published().save(path)
    plans = [planned(profile=each) for each in (published(), "published", path, str(path))]
    assert plans.count(plans[0]) == 4
    inside = plans[0].cluster.inside.all_gather
    assert 1 / inside.seconds_per_byte == pytest.approx(450e9 * shipped("inside"))
    assert inside.alpha_per_rank_s == pytest.approx(0.6e-6 * shipped("hops"))
    assert plans[0].cluster.interference == shipped("interference")
    assert plans[0].cluster.stragglers == pytest.approx(4 * shipped("stragglers"))  # 16 ranks are 4 doublings
    rated = Profile(model(), torch.empty(64, 512), device=H100, training=dshard.planner.Training(), rates=published())
    assert plans[0].model == rated.costs(64)
    assert planned().model != plans[0].model
    other = published().constants
    slower = Rates({**other, "between": dshard.planner.Constant(0.01, 1.0, 0.1, 0.1, "", "")})
    assert cluster_of(H100, 16, profile=slower).all_gather_s(1e9, 16) > 10 * plans[0].cluster.all_gather_s(1e9, 16)


def test_hosts_are_as_they_were_asked_for_with_a_profile_too():
    given = {"ranks_per_host": 4, "between_hosts": 1e9}
    cluster = cluster_of("h100-80g", 8, profile="published", **given)
    assert (cluster.num_ranks, cluster.ranks_per_host) == (8, 4)
    assert 1 / cluster.across.all_gather.seconds_per_byte == pytest.approx(1e9 * shipped("between"))
    hop_s = (2.7e-6 + 3 * 0.6e-6) / 4  # of four hops of a ring one is between hosts
    assert cluster.across.all_gather.alpha_per_rank_s == pytest.approx(hop_s * shipped("hops"))
    four = cluster_of("h100-80g", 16, profile="published", **given).across.all_gather
    expected = 1e9 * shipped("between") * 2 ** -shipped("contention")  # twice as many hosts
    assert 1 / four.seconds_per_byte == pytest.approx(expected)
    usual = cluster_of(H100, 8, ranks_per_host=4, profile="published")
    assert cluster.all_gather_s(1e9, 8) > usual.all_gather_s(1e9, 8)


def test_a_profile_without_a_device_or_beside_links_of_a_datasheet_is_refused(tmp_path):
    with pytest.raises(PlanError, match=r"device is None: times are measured here. Pass device='a100-80g', or leave"):
        planned(profile="published", device=None)
    with pytest.raises(PlanError, match=r"Pass cluster=cluster_of\('h100-80g', 16, profile=...\) with the same"):
        planned(profile="published", cluster=cluster_of(H100, 16))
    assert planned(profile="published", cluster=cluster_of(H100, 1)).step_s > 0  # no links
    for wrong in (3, "", None.__class__):
        with pytest.raises(ArgumentError, match="profile must be 'published', the path of a profile, or a Rates"):
            planned(profile=wrong, cluster=cluster_of(H100, 16))
    missing = tmp_path / "missing.json"
    for call in (lambda: planned(profile=missing), lambda: cluster_of(H100, 16, profile=missing)):
        with pytest.raises(PlanError, match="must be a profile as JSON, but there is no such file") as raised:
            call()
        assert str(missing) in str(raised.value)
