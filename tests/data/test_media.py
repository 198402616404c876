"""Files of users: what is read, and the one line that says why a file is not."""

import io
import wave
from pathlib import Path

import av
import chex
import numpy as np
import soundfile
from absl.testing import absltest, parameterized
from PIL import Image

from ernie5_jax.data import DataError, media

FORM = media.MediaFormat(image_size=8, sample_rate=1000, temporal_stride=4)


def write_wav(path: Path, samples: np.ndarray, rate: int) -> None:
    soundfile.write(path, samples, rate)


class MediaTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = Path(self.create_tempdir().full_path)

    def test_png_and_frames_are_lossless(self):
        pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
        chex.assert_trees_all_equal(media.decode_image(media.encode_png(pixels)), pixels)

    def test_picture_is_resized_by_area_and_cropped_in_the_middle(self):
        wide = np.zeros((16, 32, 3), np.uint8)
        wide[:, 8:24] = 200
        wide[:8, 8:16] = 100
        Image.fromarray(wide).save(self.folder / "a.png")
        pixels = media.read_image(self.folder / "a.png", FORM)
        expected = np.full((8, 8, 3), 200, np.uint8)
        expected[:4, :4] = 100
        chex.assert_trees_all_equal(pixels, expected)

    def test_grey_and_transparent_pictures_become_rgb(self):
        Image.new("LA", (8, 8), (255, 0)).save(self.folder / "a.png")
        chex.assert_trees_all_equal(media.read_image(self.folder / "a.png", FORM), np.zeros((8, 8, 3), np.uint8))

    def test_gif_frames(self):
        frames = [Image.fromarray(np.full((8, 8, 3), 40 * t, np.uint8)) for t in range(5)]
        frames[0].save(self.folder / "a.gif", save_all=True, append_images=frames[1:])
        video = media.read_video(self.folder / "a.gif", FORM)
        chex.assert_shape(video, (5, 8, 8, 3))
        np.testing.assert_allclose(video[:, 0, 0, 0], [0, 40, 80, 120, 160], atol=8)

    def test_equal_frames_of_a_gif_are_not_lost(self):
        levels = [0, 0, 0, 120, 120, 40, 200, 200, 200]
        frames = [Image.fromarray(np.full((8, 8, 3), level, np.uint8)) for level in levels]
        frames[0].save(self.folder / "a.gif", save_all=True, append_images=frames[1:], duration=150)
        video = media.read_video(self.folder / "a.gif", FORM)
        np.testing.assert_allclose(video[:, 0, 0, 0], levels, atol=8)

    def test_mp4_frames(self):
        with av.open(str(self.folder / "a.mp4"), "w") as container:
            stream = container.add_stream("mpeg4", rate=5)
            stream.width = stream.height = 16
            for t in range(9):
                frame = av.VideoFrame.from_ndarray(np.full((16, 16, 3), 25 * t, np.uint8), format="rgb24")
                container.mux(stream.encode(frame))
            container.mux(stream.encode())
        video = media.read_video(self.folder / "a.mp4", FORM)
        np.testing.assert_allclose(video.mean((1, 2, 3)), 25 * np.arange(9), atol=8)

    @parameterized.parameters("wav", "flac")
    def test_audio_is_mono_at_the_rate_of_the_format(self, suffix):
        time = np.arange(4000) / 4000
        tone = 0.5 * np.sin(2 * np.pi * 100 * time)
        soundfile.write(self.folder / f"a.{suffix}", np.stack([tone, tone], 1), 4000)
        wave = media.read_audio(self.folder / f"a.{suffix}", FORM)
        self.assertLen(wave, 1000)
        expected = 0.5 * np.sin(2 * np.pi * 100 * np.arange(1000) / 1000)
        np.testing.assert_allclose(wave[50:-50], expected[50:-50], atol=5e-3)

    @parameterized.named_parameters(
        ("truncated_png", "a.png", "image", "damaged|truncated"),
        ("not_a_picture", "b.png", "image", "unknown kind"),
        ("empty_picture", "c.png", "image", "an empty file"),
        ("missing", "none.png", "image", "no such file"),
        ("truncated_wav", "a.wav", "audio", "truncated file .* bytes missing"),
        ("silent_length", "b.wav", "audio", "0 samples"),
        ("not_sound", "b.png", "audio", "unknown kind"),
        ("six_frames", "a.gif", "video", r"T = 6 frames, allowed: T = 1 mod 4, e.g. 5 or 9"),
        ("not_a_video", "b.png", "video", "unknown kind"),
    )
    def test_bad_file(self, name, modality, why):
        png = media.encode_png(np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8))
        (self.folder / "a.png").write_bytes(png[: len(png) // 2])
        (self.folder / "b.png").write_bytes(b"no picture, no sound, no video at all")
        (self.folder / "c.png").write_bytes(b"")
        write_wav(self.folder / "a.wav", np.ones(500) / 2, 1000)
        whole = (self.folder / "a.wav").read_bytes()
        (self.folder / "a.wav").write_bytes(whole[:300])
        with wave.open(str(self.folder / "b.wav"), "wb") as file:
            file.setparams((1, 2, 1000, 0, "NONE", ""))
        frames = [Image.fromarray(np.full((8, 8, 3), 40 * t, np.uint8)) for t in range(6)]
        frames[0].save(self.folder / "a.gif", save_all=True, append_images=frames[1:])
        read = {"image": media.read_image, "audio": media.read_audio, "video": media.read_video}[modality]
        with self.assertRaisesRegex(DataError, why) as caught:
            read(self.folder / name, FORM)
        self.assertIn(name, str(caught.exception))
        self.assertNotIn("\n", str(caught.exception))

    def test_a_wav_that_was_streamed_has_no_length_and_is_read(self):
        buffer = io.BytesIO()
        soundfile.write(buffer, np.ones(10) / 2, 1000, format="WAV")
        data = bytearray(buffer.getvalue())
        position = data.index(b"data")
        data[position + 4 : position + 8] = b"\xff\xff\xff\xff"
        self.assertLen(media.decode_audio(bytes(data))[0], 10)


if __name__ == "__main__":
    absltest.main()
