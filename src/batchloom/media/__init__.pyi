from .audio import decode_audio as decode_audio, inspect_audio as inspect_audio
from .images import decode_image as decode_image, inspect_image as inspect_image
from .media_content import (
    BytesContent as BytesContent,
    FileContent as FileContent,
    MediaContent as MediaContent,
    MediaLimits as MediaLimits,
    hash_edges as hash_edges,
    read_edges as read_edges,
)
from .media_inspection import MediaInspector as MediaInspector, MediaResolver as MediaResolver
from .processor import (
    PIXEL_LIMITS as PIXEL_LIMITS,
    PROCESSOR_FILES as PROCESSOR_FILES,
    TEMPLATE_FILES as TEMPLATE_FILES,
    FeatureArrays as FeatureArrays,
    FeatureExtractor as FeatureExtractor,
    MediaProcessor as MediaProcessor,
    ProcessorFiles as ProcessorFiles,
    is_tokenizer_folder as is_tokenizer_folder,
    join_features as join_features,
    open_processor as open_processor,
    read_processor_files as read_processor_files,
    stack_padded as stack_padded,
)
from .processor_families import (
    ModelTraits as ModelTraits,
    PlaceholderExpansion as PlaceholderExpansion,
    ProcessorFamily as ProcessorFamily,
    compute_mrope_positions as compute_mrope_positions,
    get_model_traits as get_model_traits,
)
from .video import FrameSampling as FrameSampling, decode_frames as decode_frames
