"""Batches depend on position only."""

import multiprocessing
import os
import random
import signal
import subprocess

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_transform
from torchvision.transforms.functional import (
    adjust_brightness,
    adjust_contrast,
    adjust_saturation,
)

from locality.data import (
    ArraySource,
    AugmentConfig,
    BadImage,
    DataConfig,
    ImageSource,
    Preprocessing,
    eval_loader,
    open_data,
    train_loader,
)
from locality.data.preprocessing import jitter_colors
from locality.data.sampling import (
    Stream,
    hash_seed,
    preserved_generators,
    sample_order,
    seed_generators,
)
from locality.errors import ProcessKilled, UserError

SMALL = Preprocessing(8)
PAD = AugmentConfig(crop="pad", pad=1)
RICH = AugmentConfig(
    auto_augment="rand-m9-mstd0.5-inc1",
    affine=10.0,
    random_erasing=0.5,
    interpolation="random",
    repeats=3,
)


class Files(ImageSource):
    """Images as if from files, of several sizes, some broken."""

    def __init__(self, count=40, broken=(), size=(12, 10)):
        self.labels = np.arange(count) % 4
        self.broken = set(broken)
        self.size = size

    def read(self, index, least=None):
        if index in self.broken:
            raise BadImage("it is broken")
        rng = np.random.default_rng(index)
        return Image.fromarray(rng.integers(0, 256, (*self.size, 3), dtype=np.uint8))

    def describe(self, index):
        return f"file {index}"


@pytest.fixture(scope="module")
def digits():
    return open_data(DataConfig(), seed=0)


def collect(source, augment, **settings):
    options = {"batch_size": 8, "seed": 0, "stop_step": 4} | settings
    return list(train_loader(source, augment, SMALL, **options))


def same(a, b):
    return (
        torch.equal(a.images, b.images)
        and torch.equal(a.targets, b.targets)
        and np.array_equal(a.indices, b.indices)
    )


def all_same(a, b):
    return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))


def test_a_batch_is_what_it_says(digits):
    batches = collect(digits.train, PAD, accumulate=2)
    assert len(batches) == 8
    for number, batch in enumerate(batches):
        assert batch.images.shape == (4, 3, 8, 8) and batch.images.dtype == torch.float32
        assert batch.targets.dtype == torch.int64 and len(batch.targets) == 4
        assert np.array_equal(batch.targets, digits.train.labels[batch.indices])
        step, micro = divmod(number, 2)
        expected = sample_order(np.arange(8)[micro::2] + 8 * step, len(digits.train), 0)
        assert np.array_equal(batch.indices, expected)


@pytest.mark.parametrize("augment", [PAD, RICH], ids=["pad", "rich"])
@pytest.mark.parametrize("workers", [0, 2])
def test_starting_at_any_step_repeats_what_came_there(digits, augment, workers):
    whole = collect(digits.train, augment)
    for start in (1, 3):
        assert all_same(
            collect(digits.train, augment, start_step=start, workers=workers), whole[start:]
        )
    assert all_same(collect(digits.train, augment, workers=workers), whole)


def test_a_worker_that_cannot_send_ends_the_run(digits, monkeypatch):
    monkeypatch.setattr(torch.UntypedStorage, "_share_fd_cpu_", None)
    with pytest.raises(ProcessKilled, match="shared memory is full"):
        collect(digits.train, PAD, workers=2)


def test_loading_in_this_process_leaves_its_generators_alone(digits):
    state = random.getstate(), torch.get_rng_state()
    legacy = np.random.get_state()[1].copy()  # noqa: NPY002
    collect(digits.train, RICH)
    collect(digits.train, PAD, workers=1)
    list(eval_loader(digits.val, SMALL, batch_size=100))
    assert random.getstate() == state[0]
    assert torch.equal(torch.get_rng_state(), state[1])
    assert np.array_equal(np.random.get_state()[1], legacy)  # noqa: NPY002


def test_batches_depend_on_their_seed_and_not_on_the_generators(digits):
    random.seed(1), torch.manual_seed(1)
    first = collect(digits.train, RICH)
    random.seed(2), torch.manual_seed(2)
    assert all_same(collect(digits.train, RICH), first)
    assert not same(collect(digits.train, RICH, seed=1)[0], first[0])


@pytest.mark.parametrize(("world_size", "accumulate"), [(1, 4), (2, 2), (8, 1)])
def test_a_global_batch_is_the_same_however_it_is_divided(digits, world_size, accumulate):
    whole, parts = collect(digits.train, RICH), world_size * accumulate
    for rank in range(world_size):
        dealt = {"rank": rank, "world_size": world_size, "accumulate": accumulate}
        own = collect(digits.train, RICH, **dealt)
        assert len(own) == accumulate * len(whole)
        for number, part in enumerate(own):
            step, micro = divmod(number, accumulate)
            first = micro * world_size + rank
            assert torch.equal(part.images, whole[step].images[first::parts])
            assert torch.equal(part.targets, whole[step].targets[first::parts])


@pytest.mark.parametrize(("crop", "hflip"), [("pad", 0.5), ("none", 0.0)])
def test_the_short_way_through_memory_changes_nothing(digits, crop, hflip):
    augment = AugmentConfig(crop=crop, pad=2, hflip=hflip, affine=10.0, random_erasing=0.5)
    subset = digits.train.subset(range(20))
    fast = collect(subset, augment)
    subset.pixels = None
    assert all_same(collect(subset, augment), fast)


@pytest.mark.parametrize(
    "augment", [PAD, RICH, AugmentConfig(crop="pad", pad=2, auto_augment="rand-m9")]
)
def test_images_are_decoded_once_where_all_fit_into_memory(augment, monkeypatch):
    reads = []

    class Counted(Files):
        def read(self, index, least=None):
            reads.append(index)
            return super().read(index)

    kept = collect(Counted(broken={3}), augment, stop_step=20, on_bad_image="skip")
    once = augment.crop != "resized"  # which crops differently every time
    assert (len(set(reads) - {3}) == len([read for read in reads if read != 3])) == once
    evaluated = eval_loader(Counted(), SMALL, batch_size=8)
    first = list(evaluated)
    reads.clear()
    assert all(map(same, first, evaluated)) and not reads
    monkeypatch.setattr("locality.data.loader._KEPT_BYTES", 0)
    anew = collect(Counted(broken={3}), augment, stop_step=20, on_bad_image="skip")
    assert all(map(same, kept, anew)) and len(reads) > 150
    assert all(map(same, first, eval_loader(Counted(), SMALL, batch_size=8)))


def test_a_sample_is_what_timm_makes_of_it():
    source = Files()
    augment = AugmentConfig(color_jitter=0.4, interpolation="bicubic")
    timm = create_transform(
        8, is_training=True, color_jitter=0.4, hflip=0.5, interpolation="bicubic"
    )
    batch = collect(source, augment)[0]
    seeds = hash_seed(0, Stream.AUGMENT, np.arange(8)).tolist()
    for image, index, seed in zip(batch.images, batch.indices, seeds, strict=True):
        with preserved_generators():
            seed_generators(seed)
            assert torch.equal(image, timm(source.read(index)))


def test_colours_of_a_batch_are_what_torchvision_makes_of_each_image():
    pixels = torch.randint(0, 256, (6, 3, 8, 8), generator=torch.Generator().manual_seed(0))
    uniform = torch.rand(6, 3, generator=torch.Generator().manual_seed(1))
    found = jitter_colors(pixels, uniform, 0.4) / 255
    for image, factors, mine in zip(pixels / 255, 0.6 + 0.8 * uniform, found, strict=True):
        light, contrast, saturation = factors.tolist()
        image = adjust_contrast(adjust_brightness(image, light), contrast)
        assert torch.allclose(mine, adjust_saturation(image, saturation), atol=1e-3)


# At magnitude 10 posterize keeps 0 bits; newer Pillow refuses this.
@pytest.mark.parametrize("policy", ["rand-m10-n8-inc1", "augmix-m3-w3", "original", "v0", "3a"])
@pytest.mark.parametrize("crop", ["resized", "pad", "none"])
def test_policies_of_timm_and_every_crop_give_the_size_asked_for(policy, crop):
    augment = AugmentConfig(crop=crop, auto_augment=policy)
    (batch,) = train_loader(
        Files(), augment, Preprocessing((8, 12)), batch_size=40, seed=0, stop_step=1
    )
    assert batch.images.shape == (40, 3, 8, 12)


@pytest.mark.parametrize(("world_size", "count"), [(1, 6), (2, 1), (7, 23)])
def test_evaluation_sees_every_image_once(digits, count, world_size):
    source = digits.val.subset(range(count))
    seen = [
        index
        for rank in range(world_size)
        for batch in eval_loader(source, SMALL, batch_size=4, rank=rank, world_size=world_size)
        for index in batch.indices.tolist()
    ]
    assert sorted(seen) == list(range(count))


def test_evaluation_repeats_itself_with_workers(digits):
    plain = list(eval_loader(digits.val, SMALL, batch_size=64))
    loader = eval_loader(digits.val, SMALL, batch_size=64, workers=2)
    assert len(loader) == len(plain) == 8
    for _ in range(2):
        assert all_same(list(loader), plain)
    assert len(multiprocessing.active_children()) == 2
    loader.close()
    assert not multiprocessing.active_children()
    with pytest.raises(RuntimeError, match="closed"):
        list(loader)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_image_is_replaced_by_one_that_depends_on_the_position(workers):
    source = Files(broken=(3, 17))
    loader = train_loader(source, RICH, SMALL, batch_size=8, seed=0, stop_step=20, workers=workers)
    batches = list(loader)
    assert loader.skipped == {"file 3": "it is broken", "file 17": "it is broken"}
    used = np.concatenate([batch.indices for batch in batches])
    due = sample_order(np.arange(160), 40, 0, repeats=3)
    assert not {3, 17} & set(used.tolist())
    assert np.array_equal(used != due, np.isin(due, (3, 17)))
    for batch in batches:
        assert np.array_equal(batch.targets, source.labels[batch.indices])
    # Also exact from the middle and in other batches.
    resumed = train_loader(source, RICH, SMALL, batch_size=8, seed=0, start_step=9, stop_step=20)
    assert all_same(list(resumed), batches[9:])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_image_stops_the_run_when_that_is_asked_for(workers):
    with pytest.raises(UserError, match="file 3: it is broken"):
        collect(Files(broken=(3,)), PAD, stop_step=20, workers=workers, on_bad_image="error")
    assert not multiprocessing.active_children()


def test_too_many_bad_images_stop_the_run():
    with pytest.raises(UserError, match="max_bad_images"):
        collect(Files(broken=range(10)), PAD, stop_step=20, max_bad_images=4)
    with pytest.raises(UserError, match="in a row"):
        collect(Files(3, broken=range(3)), PAD, batch_size=2, max_bad_images=9)


def test_evaluation_stops_at_a_bad_image_or_leaves_it_out():
    source = Files(10, broken=(0, 1, 5))
    with pytest.raises(UserError, match=r"file 0: it is broken"):
        list(eval_loader(source, SMALL, batch_size=2))
    loader = eval_loader(source, SMALL, batch_size=2, on_bad_image="skip")
    seen = [index for batch in loader for index in batch.indices.tolist()]
    assert seen == [2, 3, 4, 6, 7, 8, 9]
    assert list(loader.skipped) == ["file 0", "file 1", "file 5"]


def test_sources_that_are_refused(digits):
    for make, named in (
        (lambda: collect(digits.train.subset([]), PAD), "no images"),
        (lambda: eval_loader(digits.train.subset([]), SMALL, batch_size=4), "no images"),
        (lambda: ArraySource(np.zeros((2, 4, 4, 3)), [0, 1], "x"), "uint8"),
        (lambda: ArraySource(np.zeros((2, 4, 4, 3), dtype=np.uint8), [0], "x"), "1 labels"),
    ):
        with pytest.raises(UserError, match=named):
            make()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_workers_outlive_signals_to_the_whole_group(digits, number):
    loader = train_loader(digits.train, PAD, SMALL, batch_size=8, seed=0, stop_step=50, workers=2)
    others = multiprocessing.active_children()
    batches = iter(loader)
    received = [next(batches)]
    workers = [child for child in multiprocessing.active_children() if child not in others]
    assert len(workers) == 2
    # From another process, since this one's SIGTERM is deliberate.
    subprocess.run(["kill", f"-{number}", *(str(worker.pid) for worker in workers)], check=True)
    received += batches
    assert all_same(received, collect(digits.train, PAD, stop_step=50))
    assert not multiprocessing.active_children()


def test_a_killed_worker_is_named(digits):
    loader = train_loader(digits.train, PAD, SMALL, batch_size=8, seed=0, stop_step=99, workers=1)
    batches = iter(loader)
    next(batches)
    (worker,) = multiprocessing.active_children()
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(ProcessKilled, match="SIGKILL"):
        list(batches)


def test_workers_end_with_an_iteration_that_is_given_up_or_on_sigterm(digits):
    loader = train_loader(digits.train, PAD, SMALL, batch_size=8, seed=0, stop_step=50, workers=1)
    for end in (
        lambda batches, worker: batches.close(),
        lambda batches, worker: worker.terminate(),
    ):
        batches = iter(loader)
        next(batches)
        (worker,) = multiprocessing.active_children()
        end(batches, worker)
        worker.join(20)
        assert worker.exitcode == 0
    with pytest.raises(UserError, match="ended by itself"):
        list(batches)
