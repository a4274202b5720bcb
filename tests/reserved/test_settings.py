"""How the caching allocator is set: what torch takes, and what it refuses."""

from __future__ import annotations

import pytest

from autoremat.reserved.settings import MIB, AllocatorSettings


def test_divisions_of_powers_of_two_round_sizes():
    """Between 1,024 and 2,048 four divisions are 1,024, 1,280, 1,536, 1,792 (torch's example)."""
    settings = AllocatorSettings.parse("roundup_power2_divisions:4")
    assert settings.rounded(1200 * MIB) == 1280 * MIB
    assert settings.rounded(1024 * MIB) == 1024 * MIB
    assert settings.rounded(1793 * MIB) == 2048 * MIB
    assert settings.rounded(1200) == 1536  # up to 4 x 512 bytes as without


def test_divisions_may_differ_by_size():
    """As torch's own test has them (`c10/test/core/AllocatorConfig_test.cpp`)."""
    text = "roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:4,>:1]"
    divisions = AllocatorSettings.parse(text).divisions
    expected = {32: 8, 64: 8, 128: 2, 256: 4, 512: 2, 1024: 4, 2048: 1, 4096: 1, 8192: 1}
    assert {size: divisions[size.bit_length() - 1] for size in expected} == expected


def test_several_options_and_what_does_not_concern_the_device():
    """Blanks do not matter; pinned memory is the host's."""
    text = (
        " max_split_size_mb: 40, max_non_split_rounding_mb:30 ,pinned_use_background_threads:True"
    )
    settings = AllocatorSettings.parse(text)
    assert (settings.max_split_nbytes, settings.rounding_nbytes) == (40 * MIB, 30 * MIB)
    assert AllocatorSettings.parse("") == AllocatorSettings()


@pytest.mark.parametrize(
    "text",
    [
        "max_split_size_mb:19",
        "max_split_size_mb:many",
        "large_segment_size_mb:10",
        "garbage_collection_threshold:1.0",
        "expandable_segments:yes",
        "roundup_power2_divisions:3",
        "max_split_size:64",
        "max_split_size_mb",
    ],
)
def test_what_torch_refuses_is_refused_by_name(text: str):
    """The message has the option."""
    with pytest.raises(ValueError, match=text.partition(":")[0]):
        AllocatorSettings.parse(text)
