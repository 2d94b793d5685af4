from .generations import (
    GenerationLogEntry as GenerationLogEntry,
    delete_stale_files as delete_stale_files,
    next_part_number as next_part_number,
    next_shard_numbers as next_shard_numbers,
)
from .removal import RemovalResult as RemovalResult
from .verification import (
    VerificationResult as VerificationResult,
    verify_remote_store as verify_remote_store,
    verify_synthetic as verify_synthetic,
)
