"""How many checkpoints a retention policy keeps, and how many bytes that is. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from checkfreq.types import size_text


@dataclass(frozen=True, slots=True)
class Cost:
    """At most ``most`` checkpoints, and ``per_day`` more a day.

    ``rates``: what is kept besides, that depends on the training, in words. ``bounds``: what the
    bytes are limited to, in words.
    """

    most: int = 0
    per_day: float = 0.0
    rates: tuple[str, ...] = ()
    bounds: tuple[str, ...] = ()

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.most + other.most,
            self.per_day + other.per_day,
            self.rates + other.rates,
            self.bounds + other.bounds,
        )

    def text(self, num_bytes: int) -> str:
        """In words, for checkpoints of ``num_bytes`` each."""
        said = [f"up to {self.most} checkpoints ({size_text(self.most * num_bytes)})"]
        if self.per_day:
            daily = size_text(round(self.per_day * num_bytes))
            said.append(f"{self.per_day:g} more a day ({daily})")
        said += [f"{rate} ({size_text(num_bytes)} each)" for rate in self.rates]
        limits = "".join(f", {bound}" for bound in self.bounds)
        return " and ".join(said) + limits
