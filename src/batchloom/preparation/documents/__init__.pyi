from .chat_encoding import PlacedMedium as PlacedMedium
from .conversation_encoder import UNTRAINED_RULE as UNTRAINED_RULE, EncodedBatch as EncodedBatch
from .document_encoder import (
    DirectEncoder as DirectEncoder,
    EncodeContext as EncodeContext,
    EncodedDocuments as EncodedDocuments,
    encode_documents as encode_documents,
    normalize_records as normalize_records,
)
from .record_parsers import (
    TEMPLATED_KINDS as TEMPLATED_KINDS,
    ParsedRecords as ParsedRecords,
    RecordParser as RecordParser,
    RecordParsers as RecordParsers,
    check_one_objective as check_one_objective,
    get_objective as get_objective,
    iter_parsed_records as iter_parsed_records,
    iter_texts as iter_texts,
    make_record_parser as make_record_parser,
    read_sample_rows as read_sample_rows,
)
from .subsets import (
    MoveCandidates as MoveCandidates,
    SubsetRule as SubsetRule,
    hash_to_unit_interval as hash_to_unit_interval,
)
from .token_encoder import (
    compute_document_keys as compute_document_keys,
    estimate_characters as estimate_characters,
)
from .tokenizer_choice import (
    choose_dtype_name as choose_dtype_name,
    choose_job_template as choose_job_template,
    choose_job_tokenizer as choose_job_tokenizer,
    find_unused_columns as find_unused_columns,
    make_chat_encoder as make_chat_encoder,
    make_media_encoder as make_media_encoder,
)
