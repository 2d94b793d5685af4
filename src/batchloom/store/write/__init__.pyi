from .store_writer import (
    LengthsWriter as LengthsWriter,
    ShardWriter as ShardWriter,
    make_folder as make_folder,
    sync_folder as sync_folder,
    write_bands as write_bands,
    write_file as write_file,
    write_mask as write_mask,
    write_media as write_media,
    write_pieces as write_pieces,
    write_sides as write_sides,
    write_sums as write_sums,
    writing as writing,
)
from .stream_ranges import stretch_bounds as stretch_bounds, write_stretches as write_stretches
