from .direct_encoder import DirectEncoder as DirectEncoder, EncodedDocuments as EncodedDocuments
from .document_facts import (
    estimate_characters as estimate_characters,
    iter_texts as iter_texts,
    make_duplicate_keys as make_duplicate_keys,
)
from .encode_chat import ChatEncoder as ChatEncoder
from .encode_documents import (
    DocumentEncoder as DocumentEncoder,
    EncodeContext as EncodeContext,
    UnitEncoder as UnitEncoder,
    encode_documents as encode_documents,
)
from .encoded_batch import EncodedBatch as EncodedBatch
from .media_tokens import PlacedMedium as PlacedMedium
from .record_parsers import (
    TEMPLATED_KINDS as TEMPLATED_KINDS,
    WHOLE_TEXTS as WHOLE_TEXTS,
    RecordParser as RecordParser,
    RecordParsers as RecordParsers,
    check_one_objective as check_one_objective,
    get_objective as get_objective,
    make_record_parser as make_record_parser,
    read_sample_rows as read_sample_rows,
)
from .subsets import (
    MoveCandidates as MoveCandidates,
    SubsetRule as SubsetRule,
    hash_to_unit_interval as hash_to_unit_interval,
)
from .tokenizer_choice import (
    choose_dtype_name as choose_dtype_name,
    choose_job_template as choose_job_template,
    choose_job_tokenizer as choose_job_tokenizer,
    find_unused_columns as find_unused_columns,
    make_chat_encoder as make_chat_encoder,
    make_media_encoder as make_media_encoder,
)
