"""What ranks share, measured: what products lose beside a collective, and what a gather loses between many hosts."""

import math
from dataclasses import dataclass, field, replace
from random import Random

import pytest
import torch
from torch.distributed import get_world_size, init_device_mesh

from benchmarks.calibration import measuring, sharing
from benchmarks.calibration.sharing import Gathers, contention, drawn, gathers_across, interference, measured_shares
from dshard.planner import Cluster, Link, Links, published
from dshard.tensor.meshes import group_of
from dshard.testing import WorldPool
from tests.calibration.test_measuring import make_quick

KNOWN = published().constants
CONTENTION, INTERFERENCE = KNOWN["contention"], KNOWN["interference"]
OPEN = {"spread": 1e6}  # nothing is known


@dataclass
class Device:
    """Two streams and a clock: while a collective is under way, products run at a part of their rate.

    Attributes:
        product_s: Of one product alone.
        gather_s: Of the collective.
        lost: By which part products are slower beside it.
        jitter: By how much of itself each measurement is off at most.
    """

    product_s: float
    gather_s: float
    lost: float
    jitter: float = 0.0
    asked: list[int] = field(default_factory=list)
    chance: Random = field(default_factory=lambda: Random(0))

    def off(self, seconds):
        return seconds * (1 + self.chance.uniform(-self.jitter, self.jitter))

    def products_s(self, num):
        return self.off(num * self.product_s)

    def collective_s(self):
        return self.off(self.gather_s)

    def beside_s(self, num):
        self.asked.append(num)
        work_s = num * self.product_s
        done_beside_s = min(work_s, self.gather_s * (1 - self.lost))  # of the work, while it is under way
        return self.off(done_beside_s / (1 - self.lost) + work_s - done_beside_s)

    def slowest(self, number):
        return number


@pytest.mark.parametrize("lost", [0.0, 0.1, 0.4])
@pytest.mark.parametrize("product_s", [1e-5, 3e-4, 0.1])
def test_what_products_lose_beside_a_collective_is_found(lost, product_s):
    device = Device(product_s, 2e-3, lost)
    found = interference(device, replace(INTERFERENCE, **OPEN))
    assert found.value == pytest.approx(max(lost, 1e-3), abs=1e-6)
    assert min(device.asked) * product_s >= 2 * device.gather_s  # they outlast it


def test_a_noisy_clock_leaves_what_was_known():
    quiet, noisy = (interference(Device(1e-4, 2e-3, 0.4, jitter), INTERFERENCE) for jitter in (0.0, 0.2))
    assert INTERFERENCE.value < noisy.value < quiet.value < 0.4
    assert quiet.uncertainty < noisy.uncertainty <= INTERFERENCE.spread
    assert (quiet.prior, quiet.unit) == (INTERFERENCE.prior, INTERFERENCE.unit)


def test_what_is_measured_is_drawn_to_what_was_known_as_far_as_it_may_be_off():
    known = replace(CONTENTION, value=0.2, spread=0.5)  # 0.2, give or take 0.1
    assert drawn(known, 0.4, 0.1).value == pytest.approx(0.3)
    assert drawn(known, 0.4, 0.1).uncertainty == pytest.approx(0.1 / math.sqrt(2) / 0.3)
    assert drawn(known, 0.4, 1e-9).value == pytest.approx(0.4)
    assert drawn(known, 0.4, 1e9).value == pytest.approx(0.2)
    assert drawn(known, -5.0, 1e-3).value == 1e-3  # by noise: no rate rises with the number of hosts


@pytest.mark.parametrize("exponent", [0.05, 0.25, 0.5])
def test_the_exponent_of_contention_is_found_the_better_the_more_hosts_there_are(exponent):
    known, off = replace(CONTENTION, value=0.2, spread=0.5), []
    for num_hosts in (3, 8, 512):
        every = Link(1e-4, 1e-9 * (num_hosts / 2) ** exponent)
        found = contention(Link(2e-5, 1e-9), every, num_hosts, known)
        off.append(abs(found.value - exponent))
        free = contention(Link(2e-5, 1e-9), every, num_hosts, replace(known, **OPEN))
        assert free.value == pytest.approx(exponent)
    assert off == sorted(off, reverse=True)
    assert off[-1] < 0.02
    assert contention(Link(1e-5, 0.0), Link(1e-5, 1e-9), 3, known) == known


def cluster_of_hosts(num_ranks, per_host, overlaps=False):
    own = Links.of(Link(1e-4, 1e-9))
    across = Links.of(Link(1e-4, 2e-9)) if per_host < num_ranks else None
    return Cluster(
        num_ranks, per_host, own, across, overlaps=overlaps, shards={num_ranks: across or own}, source="given"
    )


def shares(per_host, overlaps):
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch)
        mesh = init_device_mesh("cpu", (get_world_size(),))
        group, cluster = group_of(mesh), cluster_of_hosts(get_world_size(), per_host, overlaps)
        found = measured_shares(mesh, cluster, KNOWN)
        return found, gathers_across(group, per_host) if "contention" in found else None


def make_small(patch):
    patch.setattr(sharing, "_SIZES", (1 << 12, 1 << 14))
    patch.setattr(sharing, "_LARGE", {"cpu": 1 << 14})
    patch.setattr(sharing, "_WIDTH", {"cpu": 64})
    patch.setattr(sharing, "_ROUNDS", 2)


@pytest.mark.parametrize("num_ranks", [3, 4])
def test_three_hosts_measure_contention_alike_and_two_do_not(num_ranks, worlds: WorldPool, messaging: WorldPool):
    for pool in (worlds, messaging):
        (found, links), *others = pool.run(num_ranks, shares, 1, False)
        assert all(other == (found, links) for other in others)
        assert set(found) == {"contention"}
        assert all(link.alpha_s >= 0 and link.seconds_per_byte >= 0 for link in links)
    if num_ranks == 4:
        assert worlds.run(4, shares, 2, False) == [({}, None)] * 4


def test_where_collectives_run_beside_computation_interference_is_measured(worlds: WorldPool):
    (found, _), other = worlds.run(2, shares, 2, True)
    assert found == other[0]
    assert set(found) == {"interference"}
    assert 0 < found["interference"].value < float("inf")


def timed():
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch)
        probe = Gathers(group_of(init_device_mesh("cpu", (2,))))
        return probe.products_s(3), probe.collective_s(), probe.beside_s(3), probe.slowest(float(torch.rand(1) > 2))


def test_products_and_gathers_are_timed(worlds: WorldPool):
    for *seconds, zero in worlds.run(2, timed):
        assert all(each > 0 for each in seconds)
        assert zero == 0.0


def measured_here():
    with pytest.MonkeyPatch.context() as patch:
        make_quick(patch)
        make_small(patch)
        patch.setattr(measuring, "measure_links", lambda mesh, again: cluster_of_hosts(mesh.size(), 1, overlaps=True))
        return measuring.measure_here(torch.device("cpu"), published(), init_device_mesh("cpu", (3,)))


def test_a_profile_of_devices_at_hand_has_what_their_ranks_share(worlds: WorldPool):
    found, *others = worlds.run(3, measured_here)
    assert all(other == found for other in others)
    rates, here = found.rates, found.rates.here
    assert set(found.shares) == {"interference", "contention"}
    assert {name: rates.constants[name] for name in found.shares} == found.shares
    assert here.cluster.interference == found.shares["interference"].value
    for name in KNOWN.keys() - found.shares.keys():
        assert rates.constants[name] == KNOWN[name]
    wire = here.device.between_hosts.bytes_per_s  # of two hosts: what was measured among three, and more
    assert rates.between(wire, math.inf, 3) == pytest.approx(1 / 2e-9)
    assert rates.between(wire, math.inf, 2) > 1 / 2e-9
