"""The paper's models build and answer, also where torchvision's compiled operators do not load."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import nn

from checkfreq.examples.imagenet.models import MODELS, SMALLEST_IMAGE, build, logits_of, loss_of

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="torchvision is not installed"
)


@pytest.mark.parametrize("arch", [*MODELS, "resnet34", "vgg11", "googlenet"])
def test_every_model_has_the_classes_asked_for(arch: str) -> None:
    with torch.device("meta"):
        model = build(arch, num_classes=7)
    side = max(64, SMALLEST_IMAGE.get(arch, 0))
    output = model.train()(torch.zeros(2, 3, side, side, device="meta"))
    assert logits_of(output).shape == (2, 7)


def test_an_unknown_model_is_named_with_those_that_are_known() -> None:
    with pytest.raises(ValueError, match=r"unknown model 'no_such_net': .* such as resnet18, "):
        build("no_such_net", num_classes=2)


def test_loss_of_inception_counts_the_auxiliary_head_at_four_tenths() -> None:
    logits, aux = torch.randn(4, 3), torch.randn(4, 3)
    target = torch.tensor([0, 1, 2, 0])
    criterion = nn.CrossEntropyLoss()
    both = loss_of(criterion, output=(logits, aux), target=target)
    assert torch.equal(both, criterion(logits, target) + 0.4 * criterion(aux, target))
    assert torch.equal(loss_of(criterion, output=logits, target=target), criterion(logits, target))
