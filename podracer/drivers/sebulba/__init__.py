"""Sebulba: actors on some devices step environments of the host, learners on the others update.

    actor threads:  parameters -> T x (inference, environment step) -> trajectory -> learner devices
    caller thread:  trajectories of all actors -> update -> parameters

Source: Hessel et al. 2021, section 4 (arXiv 2104.06272).
"""

from podracer.drivers.sebulba.config import DeviceSplit as DeviceSplit
from podracer.drivers.sebulba.config import SebulbaConfig as SebulbaConfig
from podracer.drivers.sebulba.config import split_devices as split_devices
from podracer.drivers.sebulba.config import with_threads as with_threads
from podracer.drivers.sebulba.driver import Sebulba as Sebulba
from podracer.drivers.sebulba.driver import check as check
