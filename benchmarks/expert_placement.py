"""What Mixtral-8x7B takes on 64 H100, its stacks of 8 experts cut along experts, or along features.

```console
$ python benchmarks/expert_placement.py
```

Needs `transformers` (extra `interop`). Nothing is run: the model is on meta, and half a minute of one core goes by.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Shard
from transformers import AutoModelForCausalLM, MixtralConfig

import dshard
from dshard.planner import Training, cluster_of


def along_features(param: nn.Parameter) -> Shard | None:
    """Stacks along the dim behind that of the experts."""
    return Shard(1) if param.ndim == 3 else None


def main() -> None:
    """Print what each placement takes under `full`, and the plan for the devices' memory."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(MixtralConfig(use_cache=False), dtype=torch.float32)
    ids = torch.zeros(1, 4096, dtype=torch.int64)
    given: dict[str, Any] = {"device": "h100-80g", "profile": "published"}
    given["training"] = Training(torch.bfloat16, torch.float32)
    given["cluster"] = cluster_of("h100-80g", 64, profile="published")
    for name, placed in (("experts", None), ("features", along_features)):
        options = given | {"shard_placement_fn": placed}
        sample = {"input_ids": ids, "labels": ids}
        least = dshard.plan(model, sample, **options, strategies="full", checkpointing="full", memory="1TiB")
        print(f"along {name}: `full`, all checkpointed, takes {least.peak_bytes / 2**30:.1f} GiB")
        try:
            plan = dshard.plan(model, sample, **options, checkpointing="auto")
            print(f"  the plan takes {plan.peak_bytes / 2**30:.1f} GiB")
        except dshard.PlanError as error:
            print(f"  no plan: {error}")


if __name__ == "__main__":
    main()
