from .generation_log import Logged as Logged
from .generations import (
    clear_leftovers as clear_leftovers,
    next_part as next_part,
    next_shards as next_shards,
)
from .missing_media import GoneOf as GoneOf, write_gone as write_gone
from .remote_verification import verify_far as verify_far
from .removal import Removal as Removal
from .verification import Verdict as Verdict, verify_synthetic as verify_synthetic
