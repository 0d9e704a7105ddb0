"""The classifiers of torchvision: ``build("resnet18", num_classes=8)``.

torchvision's wheels are built against CUDA torch. Under a CPU-only torch its compiled
operators do not load, and registering their Python side fails with "operator torchvision::nms
does not exist". Image classification needs none of them, so `torchvision` here declares the
two names first, which is enough for models, datasets and transforms to import.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import nn

#: Those of the paper; --arch -> torchvision's name. "resnext101" is the paper's 32x8d.
MODELS = {
    "resnet18": "resnet18",
    "resnet50": "resnet50",
    "resnext101": "resnext101_32x8d",
    "densenet121": "densenet121",
    "vgg16": "vgg16",
    "inception_v3": "inception_v3",
}

#: Smallest square image, in pixels, that a model trains on, where that is above 32: Inception's
#: auxiliary head sets it (without that head, 75).
SMALLEST_IMAGE = {"inception_v3": 299}

_NMS = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_declared: list[torch.library.Library] = []


def import_torchvision() -> ModuleType:
    """torchvision, also where its compiled operators do not fit the installed torch."""
    try:
        import torchvision
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        _declare_operators()
        import torchvision
    return torchvision


def _declare_operators() -> None:
    """Declare the operators that torchvision's Python files refer to at import."""
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(name + _NMS)
    _declared.append(library)  # the declarations live as long as this object


def build(arch: str, *, num_classes: int, aux: bool = True) -> nn.Module:
    """A model with fresh weights drawn from torch's default generator.

    ``aux``: with auxiliary heads, which Inception and GoogLeNet have.
    Raises ValueError for a name that is not in `names`.
    """
    if arch not in names():
        raise ValueError(
            f"unknown model {arch!r}: expected a classifier of torchvision, such as "
            f"{', '.join(MODELS)}"
        )
    has_aux = arch in ("inception_v3", "googlenet")
    extra = {"aux_logits": aux, "init_weights": True} if has_aux else {}
    get_model = import_torchvision().models.get_model
    model: nn.Module = get_model(MODELS.get(arch, arch), num_classes=num_classes, **extra)
    return model


def names() -> set[str]:
    """What ``--arch`` takes."""
    models = import_torchvision().models
    return {*MODELS, *models.list_models(module=models)}


def loss_of(criterion: nn.Module, *, output: object, target: torch.Tensor) -> torch.Tensor:
    """The loss of a batch; each auxiliary head, which answers in training only, counts x 0.4."""
    if isinstance(output, torch.Tensor):
        loss: torch.Tensor = criterion(output, target)
        return loss
    logits, *heads = output  # type: ignore[misc]  # torchvision's InceptionOutputs
    loss = criterion(logits, target)
    return sum((0.4 * criterion(head, target) for head in heads), start=loss)


def logits_of(output: object) -> torch.Tensor:
    """The class scores [N, C] of a model's output."""
    return output if isinstance(output, torch.Tensor) else output[0]  # type: ignore[index]
