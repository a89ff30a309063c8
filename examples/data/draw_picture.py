"""Draws picture.jpg: a house by a lake at sunset, with a sign to read. Needs only Pillow."""

from __future__ import annotations

import math
import random
from pathlib import Path

from PIL import Image, ImageDraw, ImageFilter, ImageFont


WIDTH, HEIGHT = 640, 480
HORIZON = 290


def sky(draw: ImageDraw.ImageDraw) -> None:
    for y in range(HORIZON):
        t = y / HORIZON
        draw.line([(0, y), (WIDTH, y)], fill=(int(70 + 175 * t), int(110 + 60 * t), int(180 - 90 * t)))
    draw.ellipse([440, 180, 540, 280], fill=(255, 224, 130))


def hills(draw: ImageDraw.ImageDraw) -> None:
    for base, height, colour in ((250, 60, (92, 84, 120)), (275, 35, (66, 74, 92))):
        ridge = [
            (x, base - height * (0.5 + 0.5 * math.sin(x / 75 + base) * math.cos(x / 31)))
            for x in range(0, WIDTH + 1, 4)
        ]
        draw.polygon([(0, HORIZON), *ridge, (WIDTH, HORIZON)], fill=colour)


def lake(draw: ImageDraw.ImageDraw, chance: random.Random) -> None:
    draw.rectangle([0, HORIZON, WIDTH, HEIGHT], fill=(52, 78, 118))
    for _ in range(260):
        y = chance.randint(HORIZON + 2, HEIGHT)
        x, length = chance.randint(0, WIDTH), chance.randint(8, 46)
        near_sun = abs(x - 490) < 26 + (y - HORIZON) // 3
        draw.line([(x, y), (x + length, y)], fill=(244, 196, 120) if near_sun else (78, 108, 150), width=2)


def shore(draw: ImageDraw.ImageDraw) -> None:
    draw.polygon([(0, 345), (150, 325), (330, 372), (250, HEIGHT), (0, HEIGHT)], fill=(70, 96, 58))
    draw.polygon([(60, 348), (82, 346), (170, HEIGHT), (90, HEIGHT)], fill=(164, 142, 104))


def house(draw: ImageDraw.ImageDraw) -> None:
    draw.rectangle([40, 240, 190, 350], fill=(176, 72, 58), outline=(90, 34, 28), width=3)
    draw.polygon([(25, 244), (115, 170), (205, 244)], fill=(74, 50, 46))
    draw.rectangle([152, 176, 172, 220], fill=(110, 60, 54))
    draw.rectangle([98, 286, 134, 350], fill=(62, 40, 34))
    for left in (54, 148):
        draw.rectangle([left, 268, left + 30, 300], fill=(255, 220, 120), outline=(240, 236, 226), width=3)
        draw.line([(left + 15, 268), (left + 15, 300)], fill=(240, 236, 226), width=2)


def tree(draw: ImageDraw.ImageDraw, chance: random.Random) -> None:
    draw.polygon([(252, 362), (262, 362), (259, 270), (254, 270)], fill=(70, 48, 36))
    for _ in range(70):
        angle, distance = chance.uniform(0, math.tau), chance.uniform(0, 42)
        x, y, size = 257 + distance * math.cos(angle), 250 + distance * math.sin(angle), chance.randint(7, 14)
        green = chance.randint(90, 150)
        draw.ellipse([x - size, y - size, x + size, y + size], fill=(38, green, 52))


def boat_and_sign(draw: ImageDraw.ImageDraw) -> None:
    draw.polygon([(400, 372), (500, 372), (480, 396), (418, 396)], fill=(236, 232, 220))
    draw.line([(448, 372), (448, 286)], fill=(60, 44, 36), width=4)
    draw.polygon([(454, 292), (454, 364), (506, 364)], fill=(212, 84, 66))
    draw.rectangle([330, 408, 570, 462], fill=(244, 238, 214), outline=(96, 74, 48), width=4)
    draw.text((346, 420), "Boats 7:30 - 18:00", fill=(40, 36, 32), font=ImageFont.load_default(24))


def main() -> None:
    chance = random.Random(4)
    picture = Image.new("RGB", (WIDTH, HEIGHT))
    draw = ImageDraw.Draw(picture)
    sky(draw)
    hills(draw)
    picture.paste(picture.filter(ImageFilter.GaussianBlur(2)))
    lake(draw, chance)
    shore(draw)
    house(draw)
    tree(draw, chance)
    boat_and_sign(draw)
    picture.save(Path(__file__).with_name("picture.jpg"), quality=88)


if __name__ == "__main__":
    main()
