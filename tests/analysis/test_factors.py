import struct
import zlib

import numpy as np
import pytest
import torch

from locality.analysis.explorer import Factors, factorise


def attention(queries, keys, width, scale, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(queries, width, generator=generator, dtype=torch.float64)
    k = torch.randn(keys, width, generator=generator, dtype=torch.float64)
    return (scale * q @ k.T / width**0.5).softmax(-1)


def read_back(found):
    """The attention that factors stand for."""
    scores = found.step**2 * (found.queries.T.astype(np.float64) @ found.keys)
    return torch.from_numpy(scores).softmax(-1).numpy()


@pytest.mark.parametrize("shape", [(16, 16, 16), (197, 197, 48), (49, 12, 8), (1, 1, 4)])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 8.0])
@pytest.mark.parametrize("tolerance", [0.05, 0.005])
def test_every_attention_is_within_the_promised_factor(shape, scale, tolerance):
    true = attention(*shape, scale)
    found = read_back(factorise(true, tolerance))
    ratio = np.log(found) - true.log().numpy()
    assert np.abs(ratio).max() <= 2 * tolerance * (1 + 1e-6)


def test_coarser_is_smaller():
    true = attention(64, 64, 32, 2.0)
    packed = (factorise(true, tolerance).pack() for tolerance in (1e-3, 1e-1))
    fine, coarse = (len(zlib.compress(each)) for each in packed)
    assert coarse < 0.8 * fine


def test_attention_without_structure_takes_no_space():
    uniform = torch.full((50, 50), 1 / 50, dtype=torch.float64)
    assert len(factorise(uniform, 0.01).pack()) == 8


def test_rank_is_not_more_than_the_width_of_the_head():
    found = factorise(attention(300, 300, 24, 1.0), 1e-3)
    used = (np.abs(found.queries).max(1) > 0) & (np.abs(found.keys).max(1) > 0)
    assert used.sum() <= 24


def test_packed_form_reads_back():
    generator = torch.Generator().manual_seed(0)
    decay = 0.5 ** torch.arange(12, dtype=torch.float64)  # some components large, some small
    q, k = (torch.randn(n, 12, generator=generator, dtype=torch.float64) for n in (30, 20))
    found = factorise((4 * q * decay @ k.T).softmax(-1), 1e-2)
    packed = found.pack()
    rank, step = struct.unpack("<If", packed[:8])
    assert step == found.step and 0 < rank <= 12
    place, read = 8, []
    for count in (30, 20):
        low, high = np.frombuffer(packed, np.uint8, 2 * rank * count, place).reshape(2, rank, count)
        read.append((low + 256 * high.astype(int) - 128).astype(np.int16))
        place += 2 * rank * count
    assert (np.abs(read[0]) > 127).any() and not (np.abs(read[0]) > 127).all()
    assert place == len(packed)
    again = Factors(read[0], read[1], step)
    np.testing.assert_allclose(read_back(again), read_back(found), rtol=1e-12)


def test_zero_attention_is_refused():
    with pytest.raises(ValueError, match="no finite score"):
        factorise(torch.eye(3, dtype=torch.float64), 0.01)


def test_a_tolerance_beyond_sixteen_bits_is_refused():
    with pytest.raises(ValueError, match="larger tolerance"):
        factorise(attention(30, 20, 12, 8.0), 1e-7)
