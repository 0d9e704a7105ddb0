"""A loop without a loader, which passes its boundaries itself: clean, or with one planted fault.

python loop.py [FAULT]
"""

import sys
import time

import torch
from torch import nn

from checkfreq import CFCheckpoint, CFManager

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
STEPS = 40
#: Another one in each run, and no cause of anything.
RUN_NAME = f"run-{time.time()}"


class Environment:
    """It has a state, and no ``state_dict``."""

    def __init__(self) -> None:
        self.state = torch.zeros(8)

    def step(self, action: torch.Tensor) -> torch.Tensor:
        self.state = 0.9 * self.state + action
        return self.state


torch.set_num_threads(1)
torch.manual_seed(0)
data = torch.randn(1000, 8)
model = nn.Linear(8, 8)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
environment, place = Environment(), {"step": 0}
chk = CFCheckpoint(model=model, optimizer=optimizer, place=place)
with CFManager("chk", chk) as manager:
    manager.restore()
    step = place["step"]  # restored, after restore()
    observed = torch.zeros(8)
    words = list({"one", "two", "three", "four", "five", "six"})
    while step < STEPS:
        if FAULT == "environment":
            action = model(observed)
            observed = environment.step(action.detach() + torch.randn(8))
            loss = (model(observed) - observed).square().mean()
        else:
            loss = model(data[torch.randint(len(data), (16,))]).square().mean()
        if FAULT == "set-order":
            loss = loss * (1 + words.index("one"))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        place["step"] = step
        manager.step()
print("done", flush=True)
