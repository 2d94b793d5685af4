from .batch_media import BatchMedia as BatchMedia
from .media_stores import check_store_media as check_store_media
