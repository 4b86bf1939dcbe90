"""Draw an all-reduce algorithm: `python -m common.backend.algorithms ring 4`."""

from common.backend.algorithms import main
from common.system.errors import exit_on_user_error

with exit_on_user_error():
    main()
