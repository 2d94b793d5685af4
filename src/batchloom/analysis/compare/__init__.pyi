from .compare_report import AnyComparison as AnyComparison
from .comparison import compare as compare
from .frameworks import (
    FRAMEWORKS as FRAMEWORKS,
    CompareSpec as CompareSpec,
    read_record as read_record,
    require_compare_packages as require_compare_packages,
    run_example as run_example,
)
from .loss_curves import (
    compare_runs as compare_runs,
    find_log_file as find_log_file,
    is_run_log as is_run_log,
    judge_loss_curve as judge_loss_curve,
    read_loss_curve as read_loss_curve,
)
from .witness import BatchWitness as BatchWitness, iter_expected_entries as iter_expected_entries
