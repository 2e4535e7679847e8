"""tools/gpu_slots.py: the way through a loop of machine code, by hand."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import gpu_slots

#: One product in the loop, then a branch to a slow or a fast way of one product each, and a way
#: that leaves it out.
LOOP = """
        /*0000*/                   MOV R1, R2 ;
.L_x_1:
        /*0010*/                   QMMA.SF.16832.F32.E4M3.E4M3.E8 R0, R4, R8, R0 ;
        /*0020*/              @P0 BRA `(.L_x_3) ;
        /*0030*/              @P1 BRA `(.L_x_2) ;
        /*0040*/                   FMUL R1, R1, R2 ;
        /*0050*/                   FMUL R1, R1, R2 ;
        /*0060*/                   QMMA.SF.16832.F32.E4M3.E4M3.E8 R0, R4, R8, R0 ;
        /*0070*/                   BRA `(.L_x_3) ;
.L_x_2:
        /*0080*/                   MUFU.EX2 R1, R2 ;
        /*0090*/                   QMMA.SF.16832.F32.E4M3.E4M3.E8 R0, R4, R8, R0 ;
.L_x_3:
        /*00a0*/              @P2 BRA `(.L_x_1) ;
        /*00b0*/                   EXIT ;
"""


def ways(least):
    blocks = gpu_slots.blocks_of(LOOP)
    first, last = gpu_slots.loop_of(blocks)
    way = gpu_slots.shortest(blocks, first, last, least)
    return [op.split(".")[0] for index in way for op in blocks[index].opcodes]


def test_the_shortest_way_has_all_products():
    assert ways(2) == ["QMMA", "BRA", "BRA", "MUFU", "QMMA", "BRA"]
    assert ways(1) == ["QMMA", "BRA", "BRA"]


def test_products_of_a_tile_by_hand():
    # 16 rows, 64 keys: Q and K 8 x 2 of 64 channels, P and V 16 of 64 keys.
    assert gpu_slots.least_products("nvfp4", 128) == 8 * 2 + 16
    assert gpu_slots.least_products("int8", 128) == 8 * 4 + 16 * 4
