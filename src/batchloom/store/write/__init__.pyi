from .store_writer import (
    LengthsWriter as LengthsWriter,
    ShardWriter as ShardWriter,
    make_folder as make_folder,
    sync_folder as sync_folder,
    write_checksum_file as write_checksum_file,
    write_chunks as write_chunks,
    write_mask as write_mask,
    write_shard_checksums as write_shard_checksums,
)
