"""Instruments: capture and measure the attention of a model's layers during its forward pass."""

from locality.analysis.explorer import write_explorer as write_explorer
from locality.analysis.measures import measure_model as measure_model
from locality.analysis.pictures import run_images as run_images
from locality.analysis.recording import measure_trajectory as measure_trajectory
from locality.analysis.recording import record as record
from locality.analysis.relevance import head_costs as head_costs
from locality.analysis.relevance import layer_similarity as layer_similarity
from locality.analysis.relevance import linear_cka as linear_cka
from locality.analysis.relevance import relevance as relevance
from locality.analysis.relevance import rollout as rollout
from locality.analysis.taps import LayerView as LayerView
from locality.analysis.taps import capture as capture
from locality.analysis.taps import content_off as content_off
from locality.analysis.taps import head_off as head_off
from locality.analysis.taps import position_embedding_off as position_embedding_off
from locality.analysis.taps import position_off as position_off
