from .audio import decode_sound as decode_sound, look_at_sound as look_at_sound
from .frame_sampling import Sampling as Sampling
from .images import decode_image as decode_image, look_at_image as look_at_image
from .media_content import (
    Content as Content,
    Held as Held,
    OpenFile as OpenFile,
    edge_hash as edge_hash,
    edges as edges,
)
from .media_features import (
    Arrays as Arrays,
    Features as Features,
    joined as joined,
    stacked as stacked,
)
from .media_headers import Looker as Looker
from .media_limits import MediaLimits as MediaLimits
from .media_locations import Places as Places
from .model_inputs import Traits as Traits, traits_of as traits_of
from .mrope import mrope_positions as mrope_positions
from .processor import (
    PROCESSOR_FILES as PROCESSOR_FILES,
    TEMPLATE_FILES as TEMPLATE_FILES,
    Processor as Processor,
    ProcessorFiles as ProcessorFiles,
    open_processor as open_processor,
    read_processor_files as read_processor_files,
)
from .processor_families import Expansion as Expansion, Family as Family
