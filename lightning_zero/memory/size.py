"""Human-readable numbers of bytes and parameters, in decimal units, as devices state them."""

from __future__ import annotations

import re

_PREFIXES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}


def format_bytes(count: float) -> str:
    """Format with three figures and a unit: ``160 GB``, ``1.58 MB``, ``512 B``."""
    for prefix in ("T", "G", "M", "K"):
        scale = _PREFIXES[prefix]
        if abs(count) >= 0.9995 * scale:
            value = count / scale
            digits = max(0, 3 - len(f"{abs(value):.3g}".split(".")[0]))
            return f"{value:.{digits}f} {prefix.replace('K', 'k')}B"
    return f"{count:.0f} B"


def format_ranks(world_size: int) -> str:
    """Format a number of ranks: ``1 rank``, ``8 ranks``."""
    return "1 rank" if world_size == 1 else f"{world_size} ranks"


def parse_bytes(text: str) -> int:
    """Parse a number of bytes such as ``80GB``, ``24 GiB`` or ``1e9``."""
    match = re.fullmatch(r"([\d.]+(?:e\d+)?)\s*([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"Expected a number of bytes such as '80GB' or '24GiB', got {text!r}.")
    number, prefix, is_binary = match.groups()
    scale = _PREFIXES[prefix.upper()]
    if is_binary:
        scale = 1024 ** ["", "K", "M", "G", "T"].index(prefix.upper())
    return int(float(number) * scale)


def parse_numel(text: str) -> int:
    """Parse a number of parameters such as ``10B``, ``350M`` or ``1000``."""
    match = re.fullmatch(r"([\d.]+(?:e\d+)?)\s*([KMBT]?)", text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"Expected a number of parameters such as '10B' or '350M', got {text!r}.")
    return round(float(match.group(1)) * _PREFIXES[match.group(2).upper()])
