"""Averages of weights, as by `AveragedModel` or by hand."""

from torch.optim.swa_utils import AveragedModel

import dshard
from dshard.testing import WorldPool
from tests.twins import close, data, full, mlp, same_weights, shard_children, train, twins


def averaged() -> int:
    plain, sharded = twins(mlp, shard_children)
    pair, shadows = [], []
    for m in (plain, sharded):
        ema = AveragedModel(m, avg_fn=lambda old, new, count: 0.25 * old + 0.75 * new)
        shadow = {name: p.detach().clone() for name, p in m.named_parameters()}
        for _ in range(2):
            train(m)
            with dshard.CommTrace() as trace:
                ema.update_parameters(m)
                for name, p in m.named_parameters():
                    shadow[name].lerp_(p.detach(), 0.5)
        pair.append(ema.module)
        shadows.append(shadow)
    same_weights(*pair)
    for name, value in shadows[0].items():
        close(full(shadows[1][name]), value, f"shadow of {name}")
    close(pair[1](data(2, 6)), pair[0](data(2, 6)), "forward of the average")
    return trace.calls()


def test_averaged_models_and_shadow_copies_work_without_communication(worlds: WorldPool):
    assert worlds.run(2, averaged) == [0, 0]
