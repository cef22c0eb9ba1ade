"""Film how a Walker2d learns, as docs/walker.webp: python docs/make/film.py RUN.

    python train.py Walker2d --keep-checkpoints spread:16 --run-dir RUN

RUN has 16 checkpoints; three of them walk side by side. Without a display, EGL or OSMesa is needed.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from theme import DOCS

import rank0rl
from rank0rl.run import checkpoint

SIZE, CAPTION = 240, 26  # pixels of a picture and of the line below it
SECONDS, FRAMES_PER_S = 5, 25
STEPS_PER_FRAME = 5  # of 0.008 s each: in real time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument(
        "--iterations", type=int, nargs="+", help="checkpoints; the last one follows"
    )
    parser.add_argument("--quality", type=int, default=40, help="of the pictures, 0 to 100")
    args = parser.parse_args()
    os.environ.setdefault("MUJOCO_GL", "egl")
    paths = [args.run / "checkpoints" / f"{i:08d}.pt" for i in args.iterations or (40, 80)]
    columns = [[*pictures(path)] for path in [*paths, checkpoint.latest(args.run)]]
    first, *rest = (beside(frames) for frames in zip(*columns, strict=True))
    out = DOCS / "walker.webp"
    pace = {"duration": 1000 // FRAMES_PER_S, "loop": 0}
    first.save(out, save_all=True, append_images=rest, quality=args.quality, method=6, **pace)
    print(f"{out}: {out.stat().st_size / 1000:.0f} kB")


def pictures(path: Path) -> Iterator[Image.Image]:
    """Yield pictures of the policy in a checkpoint; a new episode begins where one has ended."""
    policy = rank0rl.load(path)
    steps = checkpoint.read(path)["progress"]["steps"]
    env = policy.make_env(render_mode="rgb_array", width=SIZE, height=SIZE, camera_name="track")
    obs, _ = env.reset(seed=0)
    for _ in range(SECONDS * FRAMES_PER_S):
        yield captioned(env.render(), f"after {steps:,} steps")
        for _ in range(STEPS_PER_FRAME):
            obs, _, terminated, truncated, _ = env.step(policy(obs, deterministic=True))
            if terminated or truncated:
                obs, _ = env.reset()
    env.close()


def captioned(picture: np.ndarray, text: str) -> Image.Image:
    """Return a picture with a line of text below it."""
    image = Image.new("RGB", (SIZE, SIZE + CAPTION), "#1f2933")
    image.paste(Image.fromarray(picture), (0, 0))
    font = ImageFont.load_default(15)
    ImageDraw.Draw(image).text((SIZE / 2, SIZE + 4), text, "white", font, anchor="ma")
    return image


def beside(images: Sequence[Image.Image]) -> Image.Image:
    """Return pictures side by side."""
    return Image.fromarray(np.concatenate([np.asarray(image) for image in images], axis=1))


if __name__ == "__main__":
    main()
