from .batch_media import (
    BatchMedia as BatchMedia,
    FoundMedium as FoundMedium,
    MediaSource as MediaSource,
    Processing as Processing,
    side_by_side as side_by_side,
)
from .media_check import look_at_media as look_at_media
from .media_stores import media_of_stores as media_of_stores
from .missing_media_edits import replacing as replacing, resumed as resumed
