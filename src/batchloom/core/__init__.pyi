from .addresses import has_wildcard as has_wildcard, is_url as is_url
from .conversation import Conversation as Conversation, Labelled as Labelled, Pair as Pair
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
    record_error as record_error,
)
from .fingerprint import canonical as canonical, fingerprint as fingerprint, key128 as key128
from .keyed_hashing import (
    GOLDEN as GOLDEN,
    keyed_hashes as keyed_hashes,
    mix as mix,
    mix_int as mix_int,
)
from .locks import lock_alone as lock_alone
from .medium import (
    KINDS as KINDS,
    AudioFacts as AudioFacts,
    FrameFacts as FrameFacts,
    ImageFacts as ImageFacts,
    Medium as Medium,
    Seen as Seen,
)
from .settings import from_plain as from_plain, to_plain as to_plain
from .synthetic_data import (
    Synthetic as Synthetic,
    SyntheticSpec as SyntheticSpec,
    parse_synthetic as parse_synthetic,
)
from .wording import visible as visible
from .yaml_reader import parse_yaml as parse_yaml, read_yaml as read_yaml
