"""Ready pipelines for folders of images, one per class: ImageNet training and validation.

Both give batches as DALI does: a list of one dictionary with "data", ``[N, 3, H, W] float32``
normalised with ImageNet's mean and deviation, and "label", ``[N, 1] int32``. They run without a
GPU ("cpu") or decode, resize and normalise on one ("mixed").
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from iterators.dali.crops import NUM_UNIFORMS, random_window
from iterators.dali.files import StrPath
from iterators.dali.imports import DALIClassificationIterator, fn, pipeline_def, types
from iterators.dali.indexed import DALILoader
from iterators.dali.reader import FileReader

Device: TypeAlias = Literal["cpu", "mixed"]

_MEAN = [255 * one for one in (0.485, 0.456, 0.406)]
_DEVIATION = [255 * one for one in (0.229, 0.224, 0.225)]


def imagenet_train(
    data_dir: StrPath,
    batch_size: int,
    *,
    image_size: int = 224,
    device: Device = "cpu",
    device_id: int | None = None,
    num_threads: int = 3,
    seed: int | None = None,
    rank: int | None = None,
    world: int | None = None,
    tail: str = "short",
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    fingerprint: str | None = None,
) -> DALILoader:
    """A shuffled training loader with torchvision's random resized crop and a horizontal flip.

    ``data_dir`` has one folder per class. ``batch_size`` is per rank. Crop and flip of a sample
    depend on (``seed``, epoch, sample) alone. ``seed`` defaults to torch's initial seed
    (``torch.manual_seed``), see ``DALILoader``; ``rank`` and ``world`` to those of the process
    group. ``device`` "mixed" decodes on the GPU ``device_id``.

    Batches are ``[{"data": [N, 3, image_size, image_size] float32, "label": [N, 1] int32}]``.
    """
    reader = FileReader(
        file_root=data_dir,
        seed=seed,
        shard_id=rank,
        num_shards=world,
        tail=tail,
        num_uniforms=NUM_UNIFORMS + 1,
        fingerprint=fingerprint,
    )

    def define() -> tuple[Any, Any]:
        encoded, label, uniforms = reader(name="Reader")
        start, shape = random_window(encoded, uniforms, scale=scale, ratio=ratio)
        images = fn.decoders.image_slice(
            encoded, start=start, shape=shape, axes=[0, 1], device=device, output_type=types.RGB
        )
        images = fn.resize(images, size=[image_size, image_size])
        mirror = fn.cast(uniforms[NUM_UNIFORMS] < 0.5, dtype=types.INT32)
        return _normalised(images, mirror=mirror), label

    return _loader(define, batch_size, device, device_id, num_threads)


def imagenet_val(
    data_dir: StrPath,
    batch_size: int,
    *,
    image_size: int = 224,
    device: Device = "cpu",
    device_id: int | None = None,
    num_threads: int = 3,
    rank: int | None = None,
    world: int | None = None,
    tail: str = "short",
    fingerprint: str | None = None,
) -> DALILoader:
    """A validation loader in fixed order: shorter side resized to 8/7 ``image_size``, centre crop.

    The arguments and batches are those of ``imagenet_train``.
    """
    reader = FileReader(
        file_root=data_dir,
        seed=0,
        shuffle=False,
        shard_id=rank,
        num_shards=world,
        tail=tail,
        fingerprint=fingerprint,
    )

    def define() -> tuple[Any, Any]:
        encoded, label = reader(name="Reader")
        images = fn.decoders.image(encoded, device=device, output_type=types.RGB)
        images = fn.resize(images, resize_shorter=image_size * 8 // 7)
        return _normalised(images, crop=(image_size, image_size)), label

    return _loader(define, batch_size, device, device_id, num_threads)


def _normalised(images: Any, **how: Any) -> Any:
    return fn.crop_mirror_normalize(
        images, dtype=types.FLOAT, output_layout="CHW", mean=_MEAN, std=_DEVIATION, **how
    )


def _loader(
    define: Any, batch_size: int, device: Device, device_id: int | None, num_threads: int
) -> DALILoader:
    if device not in ("cpu", "mixed"):
        raise ValueError(f"device must be 'cpu' or 'mixed', got {device!r}")
    if device == "mixed" and device_id is None:
        raise ValueError("device='mixed' decodes on a GPU: give device_id, the local rank")
    made = pipeline_def(batch_size=batch_size, num_threads=num_threads, device_id=device_id)(define)
    # The first batch is not prepared ahead: restoring a position would discard it.
    return DALILoader(DALIClassificationIterator(made(), prepare_first_batch=False))
