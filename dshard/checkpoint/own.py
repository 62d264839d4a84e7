"""What each rank alone knows: the states of its random number generators, and its own extra."""

import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from dshard.checkpoint.shard_file import Piece
from dshard.checkpoint.stored import own_name
from dshard.checkpoint.trees import encode
from dshard.collectives import ShardGroup

OWN = "own"


def random_states(group: ShardGroup) -> dict[str, Any]:
    """The states of all generators that a program uses without naming one."""
    numpy_state: Any = np.random.get_state(legacy=False)  # noqa: NPY002 - the global one is what is to be kept
    own = {key: v.tolist() if isinstance(v, np.ndarray) else v for key, v in numpy_state["state"].items()}
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": {**numpy_state, "state": own},
    }
    if group.device_type != "cpu":
        states["device"] = torch.get_device_module(group.device_type).get_rng_state()
    return states


def own_piece(group: ShardGroup, own: dict[str, Any]) -> Piece:
    """What this rank alone knows, as a tensor."""
    text = json.dumps({**own, "random": encode(own["random"], "the random states")}).encode()
    values = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return Piece(own_name(group.world_rank, OWN), (len(text),), (0,), values)


def set_random_states(states: Mapping[str, Any], device_type: str) -> None:
    """Have the generators go on from states that `random_states` gave."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])  # noqa: NPY002 - the global one is what was kept
    if "device" in states and device_type != "cpu":
        torch.get_device_module(device_type).set_rng_state(states["device"])
