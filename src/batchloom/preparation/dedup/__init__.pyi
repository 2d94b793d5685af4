from .connected_components import components as components
from .duplicate_count import Duplicates as Duplicates
from .duplicate_search import DUPLICATE as DUPLICATE, find as find, gather as gather
from .key_files import mapped as mapped
from .line_dedup import Pieces as Pieces, Removal as Removal, piece_keys as piece_keys
from .minhash import (
    MINHASH_VERSION as MINHASH_VERSION,
    NO_KEY as NO_KEY,
    band_keys as band_keys,
    bands_for as bands_for,
    chance as chance,
)
from .near_duplicates import read_bands as read_bands, write_band_keys as write_band_keys
from .seen_texts import Seen as Seen, SeenTexts as SeenTexts
from .sorted_keys import (
    BAND_KEY as BAND_KEY,
    KEY as KEY,
    count_keys as count_keys,
    key_file as key_file,
    key_records as key_records,
    partitions_of as partitions_of,
    write_keys as write_keys,
)
