"""Audio: short-time spectra, residual vector quantisation, the codec and its training."""

from ernie5_jax.audio.errors import AudioError
from ernie5_jax.audio.protocol import AudioTokenizer
from ernie5_jax.audio.tokenizer import RvqAudioTokenizer, load_audio_tokenizer, train_audio_tokenizer

__all__ = ["AudioError", "AudioTokenizer", "RvqAudioTokenizer", "load_audio_tokenizer", "train_audio_tokenizer"]
