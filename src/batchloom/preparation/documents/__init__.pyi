from .chat_encoding import ChatEncoder as ChatEncoder
from .conversation_encoder import LeftOut as LeftOut
from .direct_encoding import (
    Direct as Direct,
    Documents as Documents,
    encode_directly as encode_directly,
)
from .document_arrays import (
    BAD_LABEL as BAD_LABEL,
    keys_of as keys_of,
    without_control as without_control,
)
from .document_encoder import (
    Task as Task,
    encode_documents as encode_documents,
    rule_of as rule_of,
    tidy as tidy,
)
from .fill_in_the_middle import make_fim as make_fim
from .input_walk import Stretch as Stretch, walk as walk
from .media_processor import job_processor as job_processor, processor_state as processor_state
from .media_tokens import PlacedMedium as PlacedMedium
from .record_parsers import (
    TEMPLATED as TEMPLATED,
    USUAL as USUAL,
    Reading as Reading,
    Readings as Readings,
    called as called,
    first_rows as first_rows,
    reading_of as reading_of,
    refuse_mixed as refuse_mixed,
    texts_in as texts_in,
)
from .subsets import Membership as Membership, Smallest as Smallest, unit_interval as unit_interval
from .token_encoder import (
    Encoded as Encoded,
    beginning as beginning,
    digests_and_sizes as digests_and_sizes,
    document_keys as document_keys,
    halves_of as halves_of,
    size_of as size_of,
)
from .tokenizer_choice import (
    chat_encoder as chat_encoder,
    dtype_name as dtype_name,
    job_template as job_template,
    job_tokenizer as job_tokenizer,
    media_encoder as media_encoder,
    unused_names as unused_names,
)
