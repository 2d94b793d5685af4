from .compare_report import Found as Found
from .comparison import CompareSpec as CompareSpec, compare as compare
from .frameworks import FRAMEWORKS as FRAMEWORKS, require_packages as require_packages
from .launch import read_record as read_record, run_example as run_example
from .loss_curves import read_run as read_run
from .run_comparison import beside as beside
from .verdict import judge as judge
from .witness import Witness as Witness, expected as expected
