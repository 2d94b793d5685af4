from .audio import decode_audio as decode_audio, inspect_audio as inspect_audio
from .frame_sampling import FrameSampling as FrameSampling
from .images import decode_image as decode_image, inspect_image as inspect_image
from .media_content import (
    BytesContent as BytesContent,
    FileContent as FileContent,
    MediaContent as MediaContent,
    hash_edges as hash_edges,
    read_edges as read_edges,
)
from .media_features import (
    FeatureArrays as FeatureArrays,
    FeatureExtractor as FeatureExtractor,
    join_features as join_features,
    stack_padded as stack_padded,
)
from .media_headers import MediaInspector as MediaInspector
from .media_limits import MediaLimits as MediaLimits
from .media_locations import MediaResolver as MediaResolver
from .model_inputs import ModelTraits as ModelTraits, get_model_traits as get_model_traits
from .mrope import compute_mrope_positions as compute_mrope_positions
from .processor import (
    PROCESSOR_FILES as PROCESSOR_FILES,
    TEMPLATE_FILES as TEMPLATE_FILES,
    MediaProcessor as MediaProcessor,
    ProcessorFiles as ProcessorFiles,
    open_processor as open_processor,
    read_processor_files as read_processor_files,
)
from .processor_families import (
    PlaceholderExpansion as PlaceholderExpansion,
    ProcessorFamily as ProcessorFamily,
)
