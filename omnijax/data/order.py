"""The order of rows: an endless sequence of permutations, computed element by element. Pure Python, so workers have it.

Each permutation is a Feistel network (Luby and Rackoff, 1988) over the next power of four, walked until it lands below
the count (Black and Rogaway, 2002); its round function is the finaliser of SplitMix64 (Steele et al., 2014).
"""

import hashlib
from dataclasses import dataclass
from functools import lru_cache

ROUNDS = 8
SMALLEST_HALF = 3  # bits: over fewer, few of all permutations would occur
WORD = 2**64 - 1


@dataclass(frozen=True)
class Order:
    """Element n is a number below `count`; each `count` elements are a permutation, of every epoch another one.

    Orders of one seed and several `member`s are independent. Nothing is kept, so it is as good for 10^10 rows.
    """

    count: int
    seed: int
    member: int = 0

    def __getitem__(self, n: int) -> int:
        epoch, index = divmod(n, self.count)
        keys = _round_keys(self.seed, self.member, epoch)
        half = max(SMALLEST_HALF, ((self.count - 1).bit_length() + 1) // 2)
        low = (1 << half) - 1
        while True:
            left, right = index >> half, index & low
            for key in keys:
                left, right = right, left ^ (_scrambled(right ^ key) & low)
            index = left << half | right
            if index < self.count:
                return index


@lru_cache(maxsize=256)
def _round_keys(seed: int, member: int, epoch: int) -> tuple[int, ...]:
    digest = hashlib.blake2b(f"{seed}/{member}/{epoch}".encode(), digest_size=8 * ROUNDS).digest()
    return tuple(int.from_bytes(digest[first : first + 8], "little") for first in range(0, len(digest), 8))


def _scrambled(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB & WORD
    return x ^ x >> 31
