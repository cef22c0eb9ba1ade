"""The loss that stands in an agent's file is the one that trains, whatever is changed and however it is computed."""

import pytest
import torch
from helpers.runs import read_summary, train
