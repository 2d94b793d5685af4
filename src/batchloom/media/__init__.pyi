from .content import Held as Held, OpenFile as OpenFile
from .features import joined as joined
from .images import decode_image as decode_image, look_at_image as look_at_image
from .limits import MediaLimits as MediaLimits
from .processor import open_processor as open_processor
from .rope import mrope_positions as mrope_positions
from .sampling import Sampling as Sampling
from .sounds import decode_sound as decode_sound, look_at_sound as look_at_sound
