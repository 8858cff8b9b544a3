# sentence-transformers' trainer and OpenCLIP's, compiled; one H200, 590 s.
. experiments/next/setup.sh
for c in "" --compile; do for k in 0 4 16; do timeout 60 python3 benchmarks/retriever.py --mini-batch-tokens 65536 --steps 6 --every 100 --contenders megabatch --kept-mini-batches $k $c --output $OUT/ret$c-$k.json 2>&1 | tail -1; done
timeout 60 python3 benchmarks/retriever.py --mini-batch-tokens 65536 --steps 6 --every 100 --contenders sentence-transformers $c --output $OUT/st$c.json 2>&1 | tail -1; done; echo T $SECONDS
timeout $((585 - SECONDS)) python3 benchmarks/openclip_trainer.py --device cuda --processes 1 --model ViT-B-32 --batch-size 32768 --accum-freq 64 --steps 6 --precision amp_bf16 --options "--workers 14 --torchcompile" --output $OUT/openclip-trainer-compiled.json > $OUT/oct.txt 2>&1; tail -3 $OUT/oct.txt | cut -c1-400
