from .addresses import has_wildcard as has_wildcard, is_url as is_url
from .conversation import (
    Conversation as Conversation,
    LabelledConversation as LabelledConversation,
    PreferencePair as PreferencePair,
)
from .document import BadRecord as BadRecord
from .errors import (
    AccessError as AccessError,
    BatchloomError as BatchloomError,
    DownloadError as DownloadError,
    GenerationError as GenerationError,
    InputError as InputError,
    InputMissingError as InputMissingError,
    InvalidJsonError as InvalidJsonError,
    MediumError as MediumError,
    MissingDependencyError as MissingDependencyError,
    NoRangesError as NoRangesError,
    OutputError as OutputError,
    PlanError as PlanError,
    RecordError as RecordError,
    SchemaError as SchemaError,
    SettingsError as SettingsError,
    StateError as StateError,
    StoreConflictError as StoreConflictError,
    StoreError as StoreError,
    StoreMissingError as StoreMissingError,
    TemplateError as TemplateError,
    TokenizerError as TokenizerError,
    TooManyBadRecordsError as TooManyBadRecordsError,
    TrainError as TrainError,
    UnusableRecordError as UnusableRecordError,
    WorkerError as WorkerError,
    make_record_error as make_record_error,
)
from .fingerprint import (
    derive_key as derive_key,
    encode_canonical as encode_canonical,
    fingerprint as fingerprint,
)
from .keyed_hashing import (
    GOLDEN as GOLDEN,
    hash_indices as hash_indices,
    mix_in_place as mix_in_place,
    mix_int as mix_int,
)
from .locks import lock_exclusively as lock_exclusively
from .medium import (
    MEDIUM_KINDS as MEDIUM_KINDS,
    AudioFacts as AudioFacts,
    FrameFacts as FrameFacts,
    ImageFacts as ImageFacts,
    Medium as Medium,
    MediumInfo as MediumInfo,
)
from .settings import from_plain as from_plain, to_plain as to_plain
from .synthetic_data import (
    SyntheticDocuments as SyntheticDocuments,
    SyntheticSpec as SyntheticSpec,
    parse_synthetic_spec as parse_synthetic_spec,
)
from .wording import escape_unprintable as escape_unprintable
from .yaml_reader import parse_yaml as parse_yaml, read_yaml as read_yaml
