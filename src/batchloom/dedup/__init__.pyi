from .keys import (
    BAND_KEY as BAND_KEY,
    key_file as key_file,
    partitions_of as partitions_of,
    write_keys as write_keys,
)
from .lines import Removal as Removal
from .minhash import band_keys as band_keys, bands_for as bands_for, chance as chance
