"""Pass recordings through the codec and back: what the codec alone costs.

    python -m model.embedded.recipe.copy_synthesis --codec codec.safetensors --wavs DIR --out OUT

Every DIR/VOICE/ROW.wav becomes OUT/VOICE/ROW.wav.
"""

from pathlib import Path

import torch
from tqdm import tqdm

from model.embedded.recipe.encode import load_codec
from model.embedded.recipe.export import read_wav
from model.embedded.recipe.sample import write_wav
from model.embedded.recipe.stepping import command_parser


def main(argv: list[str] | None = None) -> None:
    parser = command_parser("copy_synthesis", __doc__)
    parser.add_argument("--codec", type=Path, required=True, help="codec.safetensors")
    parser.add_argument("--wavs", type=Path, required=True, help="folder VOICE/ROW.wav")
    parser.add_argument("--out", type=Path, required=True, help="the same names go here")
    args = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    codec = load_codec(args.codec, device)
    for path in tqdm(sorted(args.wavs.glob("*/*.wav"))):
        wav = read_wav(path, codec.sample_rate).to(device)
        copy = codec.decode(codec.encode(wav[None]))[0, : len(wav)]
        write_wav(args.out / path.relative_to(args.wavs), copy, codec.sample_rate)


if __name__ == "__main__":
    main()
