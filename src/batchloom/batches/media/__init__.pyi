from .batch_media import (
    BatchMedia as BatchMedia,
    BatchMedium as BatchMedium,
    MediaSource as MediaSource,
    ProcessorContext as ProcessorContext,
    stack_by_row as stack_by_row,
)
from .media_check import check_store_media as check_store_media
from .media_stores import make_media_of_stores as make_media_of_stores
from .missing_media_edits import (
    replace_missing_documents as replace_missing_documents,
    resume_with_missing as resume_with_missing,
)
