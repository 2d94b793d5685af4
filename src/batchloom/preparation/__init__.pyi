from .balance import (
    DocumentGroup as DocumentGroup,
    balance_subsets as balance_subsets,
    share_notes as share_notes,
)
from .chat_encoder import ChatEncoder as ChatEncoder
from .chat_rules import ChatRules as ChatRules
from .conversations import encode_conversations as encode_conversations
from .convert import convert as convert
from .crews import Execution as Execution
from .dataset_config import DatasetConfig as DatasetConfig
from .dedup_recipe import DedupRecipe as DedupRecipe
from .examine import examine as examine
from .fim_recipe import Fim as Fim
from .importing import import_tokens as import_tokens
from .job import prepare as prepare, run_recipe as run_recipe
from .looks import Sizes as Sizes
from .media_recipe import MediaRecipe as MediaRecipe
from .overlong import OverlongError as OverlongError
from .preferences import (
    encode_labels as encode_labels,
    encode_pairs as encode_pairs,
    encode_text_pairs as encode_text_pairs,
)
from .preview import Piece as Piece, Preview as Preview
from .reading_recipe import ReadRecipe as ReadRecipe
from .recipe import (
    ChatRecipe as ChatRecipe,
    Recipe as Recipe,
    recipe_fingerprint as recipe_fingerprint,
    recipe_plain as recipe_plain,
)
from .recipe_choice import choose_recipe as choose_recipe, read_recipe as read_recipe
from .recipe_values import dedup_of as dedup_of, steps_of as steps_of
from .report import Content as Content, ReportFacts as ReportFacts, read_facts as read_facts
from .run_settings import RunSettings as RunSettings
from .sample import sample_texts as sample_texts
from .stopwatch import Spent as Spent
from .stretched import STRETCHES as STRETCHES
from .tally import Note as Note, Progress as Progress
from .work import WorkFolder as WorkFolder
